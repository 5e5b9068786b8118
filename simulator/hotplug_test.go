//go:build linux

package simulator

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func TestARackThatRecordsFirstKeepsADiskAttachedWithoutADevice(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{
		Hotplug: adminapi.HotplugAttachOnly.With(adminapi.RecordFirst)})
	r.disk("d")
	fails := func(disk string) {
		t.Helper()
		r.fault(adminapi.Fault{Operation: "instance_disk_attach", Object: disk, Times: 1,
			Device: &adminapi.DeviceFault{Fails: true}})
		_, err := r.doAttach("a", disk)
		refusedAs(500, "Internal", "Internal Server Error").check(t, err)
		if got := r.state(disk); got != "attached" {
			t.Errorf("the disk is %q, want attached", got)
		}
		r.noDevice("a")
	}
	t.Run("until the attach is repeated", func(t *testing.T) {
		fails("d")
		must[*oxide.Disk](t)(r.doAttach("a", "d"))
		r.device("a")
		r.doStop("a")
		must[*oxide.Disk](t)(r.doDetach("a", "d"))
		r.doStart("a")
	})
	t.Run("until the instance is started anew", func(t *testing.T) {
		fails("d")
		r.doStop("a")
		r.doStart("a")
		r.device("a")
	})
}

func TestRefusalsAs500NameNoReasonAndLeaveNothing(t *testing.T) {
	r := serveRack(t, engine.Config{DiskLimit: 1,
		Hotplug: adminapi.HotplugFull.With(adminapi.RefusalsAs500)})
	r.disk("d")
	r.disk("e")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	for name, instance := range map[string]string{"e": "a", "d": "b"} { // one too many; elsewhere
		_, err := r.doAttach(instance, name)
		refusedAs(500, "Internal", "Internal Server Error").check(t, err)
	}
	_, err := r.doAttach("a", "nothing")
	gone("disk", "nothing").check(t, err)
	if got := r.state("e"); got != "detached" {
		t.Errorf("the disk is %q, want detached", got)
	}
	_, err = r.doDetach("b", "d")
	refusedAs(400, "InvalidRequest",
		`cannot detach disk "d": disk is attached to another instance`).check(t, err)
}

func TestSurpriseRemovalLetsTheGuestWriteForASecondAndLosesNothingThatFsyncAcknowledged(
	t *testing.T) {
	// A write that waits while a loop device is cut off from a file would be acknowledged by a
	// filesystem without a small limit for files, such as tmpfs. A disk served by FUSE refuses it.
	r := serveRack(t, engine.Config{FlakyDisks: true,
		Hotplug: adminapi.HotplugFull.With(adminapi.SurpriseRemoval)})
	r.disk("d")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	f, err := os.OpenFile(r.device("a"), os.O_RDWR, 0)
	simtest.NoError(t, err)
	defer f.Close()
	requested, done := make(chan struct{}), make(chan error, 1)
	go func() {
		<-requested
		_, err := r.doDetach("a", "d")
		done <- err
	}()
	var last, before uint64
	for number := uint64(1); ; number++ {
		block := make([]byte, 4096)
		binary.LittleEndian.PutUint64(block, number)
		if _, err := f.WriteAt(block, 0); errors.Join(err, f.Sync()) != nil {
			break
		}
		if last = number; last == 10 {
			before = last
			close(requested)
		}
	}
	simtest.NoError(t, <-done)
	if last < 2*before {
		t.Errorf("the guest wrote %d times after the request, want a second of writes", last-before)
	}
	must[*oxide.Disk](t)(r.doAttach("b", "d"))
	got := binary.LittleEndian.Uint64([]byte(readDevice(t, r.device("b"), 0, 8)))
	if got < last {
		t.Errorf("the disk has the write %d; %d was acknowledged", got, last)
	}
}

func TestAHotplugThatNoRackHasIsRefusedWithItsReason(t *testing.T) {
	for words, want := range map[adminapi.Hotplug]string{
		"":                             "begin with full, attach-only or none",
		"sometimes":                    "begin with full, attach-only or none",
		"full,slowly":                  `unknown behaviour "slowly"`,
		"none,record-first":            "a rack with none cannot have record-first",
		"none,refusals-500":            "a rack with none cannot have refusals-500",
		"attach-only,surprise-removal": "a rack with attach-only cannot have surprise-removal",
	} {
		if err := words.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", words, err, want)
		}
	}
	all := adminapi.HotplugFull.With(adminapi.RecordFirst, adminapi.RefusalsAs500,
		adminapi.SurpriseRemoval)
	if err := all.Check(); err != nil {
		t.Error(err)
	}
}
