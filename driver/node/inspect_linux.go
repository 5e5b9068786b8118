package node

import (
	"cmp"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	// maxShownMounts limits the mounts in a volume's report, which may be in many namespaces.
	maxShownMounts = 64
	// maxShownChanges limits the changes in a volume's report.
	maxShownChanges = 50
)

// Inspect reports what this node sees of the volumes asked for or, without any, of each volume with
// a record. It may run beside the driver, and affects no call: it takes no lock, waits for nothing,
// writes nothing, and opens devices only for reading.
func (n *Service) Inspect(asked []inspection.Asked) inspection.Report {
	r := inspection.Report{Format: inspection.Format, At: time.Now().UTC(), Instance: n.InstanceID,
		Devices: []inspection.Device{}, Volumes: []inspection.Volume{}}
	all, err := n.host().List()
	if err != nil {
		r.Unseen = append(r.Unseen, unseen(inspection.PartDevices, err))
	}
	for _, d := range all {
		r.Devices = append(r.Devices, inspectDevice(d))
	}
	views, err := mount.ReadViews(n.log())
	if err != nil {
		r.Unseen = append(r.Unseen, unseen(inspection.PartMounts, err))
	}
	if len(asked) == 0 {
		for _, known := range n.records().all() {
			asked = append(asked, inspection.Asked{ID: known.Volume})
		}
		slices.SortFunc(asked, func(a, b inspection.Asked) int { return cmp.Compare(a.ID, b.ID) })
	}
	in := inspector{host: n.host(), records: n.records(), stateDir: n.StateDir}
	for _, a := range asked {
		r.Volumes = append(r.Volumes, in.volume(a, all, views))
	}
	return r
}

func unseen(part string, err error) inspection.Unseen {
	return inspection.Unseen{Part: part, Why: csierr.Plain(err.Error())}
}

func inspectDevice(d blockdev.Device) inspection.Device {
	return inspection.Device{Name: d.Name, Number: d.Number(), Serial: csierr.Plain(d.Serial),
		SizeBytes: d.SizeBytes}
}

type inspector struct {
	host     blockdev.Host
	records  *recordStore
	stateDir string // empty if nothing is kept
}

func (in inspector) volume(a inspection.Asked, all []blockdev.Device,
	views mount.Views) inspection.Volume {
	v := inspection.Volume{ID: a.ID, Devices: []inspection.Device{},
		Filesystems: []inspection.Filesystem{}, Mounts: []inspection.Mount{},
		Flight: []flight.Entry{}, Open: []flight.Entry{}}
	in.state(&v)
	v.Serial, v.From = serialOf(a, v)
	if v.Serial == "" {
		return v
	}
	own := slices.DeleteFunc(slices.Clone(all), func(d blockdev.Device) bool {
		return d.Serial != v.Serial
	})
	for _, d := range own {
		v.Devices = append(v.Devices, inspectDevice(d))
	}
	if len(own) != 1 {
		return v // it is not known which device is the volume's
	}
	shown := inspectMounts(&v, own[0], views)
	if err := in.content(&v, own[0], shown); err != nil {
		v.Unseen = append(v.Unseen, unseen(inspection.PartFilesystem, err))
		if reason := csierr.ReasonOf(err); reason != "" {
			v.Problems = append(v.Problems, inspection.Problem{Reason: reason,
				Says: csierr.Plain(err.Error())})
		} else {
			v.Unseen = append(v.Unseen, unseen(inspection.PartDevice, err))
		}
	}
	return v
}

func (in inspector) state(v *inspection.Volume) {
	if in.stateDir == "" {
		err := errors.New("OXIDE_STATE_DIR is not set")
		v.Unseen = append(v.Unseen, unseen(inspection.PartRecord, err),
			unseen(inspection.PartFlight, err))
		return
	}
	known, err := readRecordFile(filepath.Join(in.stateDir, recordFile(v.ID)))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		v.Unseen = append(v.Unseen, unseen(inspection.PartRecord, err))
	default:
		v.Record = &inspection.VolumeRecord{Disk: known.Disk, Instance: known.Instance,
			Block: known.Block}
	}
	entries, err := flight.Read(filepath.Join(in.stateDir, flight.DirName), v.ID)
	if err != nil {
		v.Unseen = append(v.Unseen, unseen(inspection.PartFlight, err))
	}
	v.Open = append(v.Open, flight.Open(entries)...)
	v.Flight = append(v.Flight, entries[max(0, len(entries)-maxShownChanges):]...)
}

func serialOf(a inspection.Asked, v inspection.Volume) (serial, from string) {
	if v.Record != nil {
		return volume.Serial(v.Record.Disk), "the volume's record"
	}
	if a.Disk != "" {
		return volume.Serial(a.Disk), "the request"
	}
	for _, e := range slices.Backward(v.Flight) {
		if e.Disk != "" {
			return volume.Serial(e.Disk), "the flight recorder"
		}
	}
	return "", ""
}

// inspectMounts adds the mounts of the volume's device to the report, and returns those in the
// driver's own namespace.
func inspectMounts(v *inspection.Volume, d blockdev.Device, views mount.Views) (own []mount.Found) {
	if views == nil {
		v.Unseen = append(v.Unseen, inspection.Unseen{Part: inspection.PartMounts,
			Why: "the mount tables could not be read"})
		return nil
	}
	known := map[string]bool{}
	for _, m := range views.Of(d, nil) {
		shown := inspection.Mount{Path: csierr.Plain(m.Mountpoint), Process: m.Process()}
		if shown.Process == "" {
			own = append(own, m)
			known[m.Mountpoint] = true
		} else if known[m.Mountpoint] {
			continue // the same mount, propagated
		}
		if !mount.IsNode(m.Info) {
			shown.FSType = m.FSType
		}
		if shown.Process == "" && shown.FSType != "" {
			if c := mount.ConditionOf(m.Info); c != mount.Healthy {
				shown.Failed = c.String()
			}
			shown.Writable = !mount.ReadOnly(m.Info) && !mount.FilesystemReadOnly(m.Info)
		}
		if len(v.Mounts) < maxShownMounts {
			v.Mounts = append(v.Mounts, shown)
		}
	}
	return own
}

func (in inspector) content(v *inspection.Volume, d blockdev.Device,
	own []mount.Found) (err error) {
	if _, err := in.host.Lookup(d.Serial); err != nil {
		return err
	}
	device, err := in.host.Open(d)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	if v.Devices[0].BlockBytes, err = device.BlockBytes(); err != nil {
		return err
	}
	if v.Devices[0].ReadOnly, err = device.ReadOnly(); err != nil {
		return err
	}
	found, err := filesystem.Find(device)
	if err != nil {
		return err
	}
	for _, sb := range found {
		v.Filesystems = append(v.Filesystems, inspection.Filesystem{Type: sb.Type, UUID: sb.UUID,
			SizeBytes: sb.SizeBytes, Damaged: sb.Damaged})
	}
	if len(found) == 1 && len(own) > 0 {
		known, err := in.records.of(v.ID).read()
		v.Filesystems[0].NotGrown = err == nil && known.Covers > 0
	}
	return nil
}
