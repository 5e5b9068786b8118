package simulator

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

// diskOps are the operations of a disk, by their names in a fault.
var diskOps = map[string]flakydisk.Op{
	"read": flakydisk.OnRead, "write": flakydisk.OnWrite, "flush": flakydisk.OnFlush,
}

func (s *Server) adminFailDisk(w http.ResponseWriter, r *http.Request) {
	var fault adminapi.DiskFault
	err := adminRead(r, &fault)
	if err == nil {
		var f flakydisk.Fault
		active, _ := s.rack.Plane().DiskFaults(r.PathValue("disk")) // FailDisk has the same error
		if f, err = diskFault(fault); err == nil {
			err = checkCount(len(active), r.URL.Path)
		}
		if err == nil {
			err = s.rack.Plane().FailDisk(r.PathValue("disk"), f)
		}
	}
	respondOfDisk(w, nil, err)
}

func (s *Server) adminHealDisk(w http.ResponseWriter, r *http.Request) {
	respondOfDisk(w, nil, s.rack.Plane().HealDisk(r.PathValue("disk")))
}

func (s *Server) adminDiskFaults(w http.ResponseWriter, r *http.Request) {
	all, err := s.rack.Plane().DiskFaults(r.PathValue("disk"))
	respondOfDisk(w, shownFaults(all), err)
}

func shownFaults(all []flakydisk.Fault) []adminapi.DiskFault {
	shown := []adminapi.DiskFault{}
	for _, f := range all {
		one := adminapi.DiskFault{From: adminapi.Size(f.From), To: adminapi.Size(f.To), Times: f.Times,
			Delay: adminapi.Duration(f.Delay), Hang: f.Hang, Lie: f.Lie, Fired: f.Fired}
		for name, op := range diskOps {
			if f.On&op != 0 {
				one.On = append(one.On, name)
			}
		}
		slices.Sort(one.On)
		shown = append(shown, one)
	}
	return shown
}

// respondOfDisk answers a request about a disk.
func respondOfDisk(w http.ResponseWriter, body any, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		http.Error(w, fmt.Sprintf("%v; name a disk by its ID, which GET /state has", err),
			http.StatusNotFound)
	case errors.Is(err, dataplane.ErrCannotFail):
		adminRespond(w, nil, badAdminRequest{fmt.Errorf("%w: start it with --disks=fuse", err)})
	case err != nil || body != nil:
		adminRespond(w, body, err)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// diskFault converts a fault to the form that package flakydisk uses.
func diskFault(fault adminapi.DiskFault) (f flakydisk.Fault, err error) {
	f = flakydisk.Fault{From: int64(fault.From), To: int64(fault.To), Times: fault.Times,
		Delay: time.Duration(fault.Delay), Hang: fault.Hang, Lie: fault.Lie}
	for _, name := range fault.On {
		op, known := diskOps[name]
		if !known {
			return f, badAdminRequest{fmt.Errorf("on has %q; use read, write or flush", name)}
		}
		f.On |= op
	}
	var kinds []string
	for name, is := range map[string]bool{"delay": f.Delay > 0, "hang": f.Hang, "lie": f.Lie} {
		if is {
			kinds = append(kinds, name)
		}
	}
	slices.Sort(kinds)
	switch {
	case f.On == 0:
		err = errors.New(`on is missing: it lists "read", "write" or "flush"`)
	case f.From < 0 || f.To < f.From:
		err = fmt.Errorf("from %d to %d is no range of bytes", f.From, f.To)
	case f.Times < 0:
		err = fmt.Errorf("times is %d; it cannot be negative", f.Times)
	case len(kinds) > 1:
		err = fmt.Errorf("%s exclude each other", strings.Join(kinds, " and "))
	case f.Lie && f.On&flakydisk.OnRead != 0:
		err = errors.New("a read cannot lie")
	case fault.Fired != 0:
		err = errors.New("fired is the rack's to count")
	}
	if err != nil {
		err = badAdminRequest{err}
	}
	return f, err
}
