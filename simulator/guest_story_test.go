package simulator

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

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
	return filepath.Join(r.GuestDir(r.instance(instance).Id), "dev", r.guestDevices(instance)[0])
}

func (r *rackServer) noDevice(instance string) {
	r.t.Helper()
	if got := r.guestDevices(instance); len(got) != 0 {
		r.t.Errorf("guest %s still sees %v", instance, got)
	}
}

func writeDevice(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	simtest.NoError(t, err)
	_, err = f.WriteAt([]byte(text), 1<<20)
	simtest.NoError(t, errors.Join(err, f.Sync(), f.Close()))
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

func TestStoppingTakesTheDevicesAwayAndStartingBringsThemBack(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	writeDevice(t, r.device("a"), "kept")
	r.doStop("a")
	r.noDevice("a")
	if got := r.state("d"); got != "attached" {
		t.Errorf("the disk is %q", got)
	}
	r.disk("cold")
	must[*oxide.Disk](t)(r.doAttach("idle", "cold"))
	r.noDevice("idle")
	r.doStart("a")
	if got := readDevice(t, r.device("a"), 1<<20, 4); got != "kept" {
		t.Errorf("got %q", got)
	}
	must[*oxide.Instance](t)(r.change("reboot", "a"))
	r.awaitState("a", "running")
	if got := readDevice(t, r.device("a"), 1<<20, 4); got != "kept" {
		t.Errorf("after a reboot: got %q", got)
	}
	r.doStart("idle")
	r.device("idle")
}

func TestDevicesAppearAccordingToFaultsAndSwitches(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{})
	size := func(node string) int64 {
		text, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(node)), "sys", "block",
			filepath.Base(node), "size"))
		simtest.NoError(t, err)
		sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		simtest.NoError(t, err)
		return sectors * 512
	}
	slow := func(delay time.Duration) {
		must[adminapi.Switches](t)(r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
			s.DeviceDelay = adminapi.Duration(delay)
			return nil
		}))
	}
	r.disk("d")
	const late = 150 * time.Millisecond
	for _, c := range []struct {
		name          string
		rule          adminapi.DeviceFault
		slow, atLeast time.Duration
		size          int64
	}{
		{"with another size", adminapi.DeviceFault{SizeBytes: 1 << 20}, 0, 0, 1 << 20},
		{"late", adminapi.DeviceFault{Delay: adminapi.Duration(late)}, 0, late, 1 << 30},
		{"late by a switch", adminapi.DeviceFault{}, late, late, 1 << 30},
		{"never", adminapi.DeviceFault{Never: true}, 0, 0, 0},
		{"after that, with the next attach", adminapi.DeviceFault{}, 0, 0, 1 << 30},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.Faults.Clear()
			slow(c.slow)
			if c.rule != (adminapi.DeviceFault{}) {
				r.fault(adminapi.Fault{Operation: "instance_disk_attach", Device: &c.rule})
			}
			start := time.Now()
			must[*oxide.Disk](t)(r.doAttach("a", "d"))
			if c.size == 0 {
				r.noDevice("a")
			} else if got := size(r.device("a")); got != c.size || time.Since(start) < c.atLeast {
				t.Errorf("it has %d bytes, and appeared after %s", got, time.Since(start))
			}
			must[*oxide.Disk](t)(r.doDetach("a", "d"))
		})
	}
	t.Run("not at all, and the attach is undone", func(t *testing.T) {
		r.Faults.Clear()
		r.fault(adminapi.Fault{Operation: "instance_disk_attach",
			Device: &adminapi.DeviceFault{Fails: true}})
		_, err := r.doAttach("a", "d")
		refusedAs(500, "Internal", "Internal Server Error").check(t, err)
		if got := r.state("d"); got != "detached" {
			t.Errorf("the disk is %q", got)
		}
	})
}

func TestOneOfManySimultaneousRequestsSucceeds(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	race := func(want string, try func(n int) error) {
		t.Helper()
		var group sync.WaitGroup
		errs := make([]error, 8)
		for n := range errs {
			group.Go(func() { errs[n] = try(n) })
		}
		group.Wait()
		won := 0
		for _, err := range errs {
			var he *oxide.HTTPError
			switch {
			case err == nil:
				won++
			case !errors.As(err, &he) || !strings.Contains(he.ErrorResponse.Message, want):
				t.Errorf("got %v, want %q", err, want)
			}
		}
		if won != 1 {
			t.Errorf("%d won, want one", won)
		}
	}
	race("already exists", func(int) error {
		_, err := r.DiskCreate(t.Context(), r.blank("same", 1))
		return err
	})
	for n := range 5 {
		must[*oxide.Instance](t)(r.doCreate(r.instanceBody("i" + strconv.Itoa(n))))
	}
	names := r.instances() // eight instances
	race("disk is attached to another instance", func(n int) error {
		_, err := r.doAttach(names[n], "d")
		return err
	})
}

func (r *rackServer) instances() []string {
	r.t.Helper()
	var names []string
	for _, i := range must[[]oxide.Instance](r.t)(r.InstanceListAllPages(r.t.Context(),
		oxide.InstanceListParams{Project: "default"})) {
		names = append(names, string(i.Name))
	}
	return names
}

// TestA27AFullHostRefusesWhatNeedsSpaceAndLosesNothing shows that a host without space refuses
// requests that need space, and loses nothing.
func TestA27AFullHostRefusesWhatNeedsSpaceAndLosesNothing(t *testing.T) {
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
	full := refusedAs(507, "InsufficientCapacity", "Insufficient capacity: Not enough storage")
	refusals := 0
	for n := range 64 {
		if _, err := r.DiskCreate(t.Context(), r.blank("d"+strconv.Itoa(n), 1)); err != nil {
			full.check(t, err)
			refusals++
			break
		}
	}
	if refusals == 0 {
		t.Fatal("the host was not full")
	}
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
