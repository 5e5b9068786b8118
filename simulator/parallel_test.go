package simulator

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// serials lists the serials that an instance's guest sees, in order.
func (r *rackServer) serials(instance string) []string {
	r.t.Helper()
	needGuests(r.t)
	files, err := filepath.Glob(filepath.Join(r.GuestDir(r.instance(instance).Id),
		"sys/block/*/device/serial"))
	simtest.NoError(r.t, err)
	var serials []string
	for _, file := range files {
		serial, err := os.ReadFile(file)
		simtest.NoError(r.t, err)
		serials = append(serials, strings.TrimRight(string(serial), "\x00\n"))
	}
	slices.Sort(serials)
	return serials
}

func TestManyCallersAttachEveryDiskToItsGuest(t *testing.T) {
	var guests []string
	wanted := map[string][]string{}
	var c engine.Config
	for i := range 5 {
		name := fmt.Sprint("guest-", i)
		guests = append(guests, name)
		c.Instances = append(c.Instances, engine.InstanceSpec{Name: name})
	}
	r := serveRack(t, c)
	for i := range 4 * len(guests) {
		name := fmt.Sprintf("disk-%02d", i)
		r.disk(name)
		guest := guests[i%len(guests)]
		wanted[guest] = append(wanted[guest], name)
	}
	// everybody calls do for every disk, and a second caller repeats each call at the same time.
	everybody := func(do func(instance, disk string) (*oxide.Disk, error)) {
		t.Helper()
		var callers sync.WaitGroup
		for guest, disks := range wanted {
			for _, disk := range slices.Concat(disks, disks) {
				callers.Go(func() {
					if _, err := do(guest, disk); err != nil {
						t.Errorf("%s, %s: %v", guest, disk, err)
					}
				})
			}
		}
		callers.Wait()
	}
	for _, delay := range []time.Duration{0, 2 * time.Millisecond} {
		if _, err := r.rack.ChangeSwitches(func(next *adminapi.Switches) error {
			next.DeviceDelay = adminapi.Duration(delay)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		everybody(r.doAttach)
		for guest, disks := range wanted {
			simtest.Eventually(t, fmt.Sprintf("%s to see %v", guest, disks),
				func() bool { return slices.Equal(r.serials(guest), disks) })
		}
		everybody(r.doDetach)
		for _, guest := range guests {
			r.noDevice(guest)
		}
	}
	if devices := r.ownDevices(); len(devices) != 0 {
		t.Errorf("the rack keeps %v", devices)
	}
}
