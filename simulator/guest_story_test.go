package simulator

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// device waits for the only device in an instance's guest and returns the path of its node.
func (r *rackServer) device(instance string) string {
	r.t.Helper()
	simtest.Eventually(r.t, "a device in guest "+instance, func() bool {
		return len(r.guestDevices(instance)) == 1
	})
	return filepath.Join(r.GuestDir(r.instance(instance).ID), "dev", r.guestDevices(instance)[0])
}

func readDevice(t *testing.T, path string, offset int64, n int) string {
	t.Helper()
	f, err := os.Open(path)
	simtest.NoError(t, err)
	defer f.Close()
	data := make([]byte, n)
	if _, err := f.ReadAt(data, offset); err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestDevicesAppearAccordingToFaults(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{})
	const late = adminapi.Duration(150 * time.Millisecond)
	for name, c := range map[string]struct {
		rule  adminapi.DeviceFault
		slow  time.Duration
		sizes []int64 // of the loop devices
	}{
		"with-another-size": {adminapi.DeviceFault{SizeBytes: 1 << 20}, 0, []int64{1 << 20}},
		"late":              {adminapi.DeviceFault{Delay: late}, time.Duration(late), []int64{1 << 30}},
		"larger":            {adminapi.DeviceFault{SizeBytes: 2 << 30}, 0, []int64{2 << 30}},
		"never":             {adminapi.DeviceFault{Never: true}, 0, nil},
		"not-at-all":        {adminapi.DeviceFault{Fails: true}, 0, nil},
	} {
		r.Faults.Clear()
		id := r.disk(name).ID
		r.fault(adminapi.Fault{Operation: "instance_disk_attach", Device: &c.rule})
		start := time.Now()
		if c.rule.Fails {
			r.demand(500, "Internal Server Error", moving("attach", "a", name))
		} else {
			r.attach("a", name)
		}
		var sizes []int64
		for _, d := range r.ownDevices() {
			sizes = append(sizes, d.SizeBytes)
		}
		if len(sizes) > 0 {
			r.device("a")
		}
		if got := r.state(name); !slices.Equal(sizes, c.sizes) || time.Since(start) < c.slow ||
			(got == "detached") != c.rule.Fails {
			t.Errorf("%s: devices of %v bytes after %s, and the disk is %s", name, sizes,
				time.Since(start), got)
		}
		if !c.rule.Fails {
			r.detach("a", name)
		}
		if size := diskSize(t, r, id); size != 1<<30 {
			t.Errorf("%s: afterwards the disk's file has %d bytes", name, size)
		}
	}
}

func TestAFullHostRefusesWhatNeedsSpaceAndLosesNothing(t *testing.T) { // A27
	needGuests(t)
	dir := t.TempDir()
	simtest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", "size=3m")
	r := serveRack(t, engine.Config{Dir: filepath.Join(dir, "rack")})
	r.disk("kept")
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	simtest.NoError(t, err)
	for _, size := range []int{1 << 16, 4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if err := f.Close(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	created := http.StatusCreated
	for n := 0; n < 64 && created == http.StatusCreated; n++ {
		created = r.send(newDisk("d" + strconv.Itoa(n))).status
	}
	r.demand(507, "Insufficient capacity: Not enough storage", newDisk("more"))
	simtest.NoError(t, os.Remove(ballast))
	made := len(r.disks())
	next := r.again()
	if got := len(next.disks()); got != made || next.state("kept") != "detached" {
		t.Errorf("there are %d disks, want %d", got, made)
	}
	next.disk("fits")
	files, err := filepath.Glob(filepath.Join(next.dir, "disks", "*"))
	if err != nil || len(files) != made+1 {
		t.Errorf("%d files for %d disks (%v)", len(files), made+1, err)
	}
}
