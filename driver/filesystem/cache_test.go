//go:build linux

package filesystem

import (
	"bytes"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// After a write that failed, the kernel shows what was to be written, as long as any program has
// the device open. A check would find the filesystem whole that is not.
func TestWhatIsCheckedAndMountedIsWhatTheDiskHas(t *testing.T) {
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, 64*guesttest.MiB)
	program, err := os.Open(d.Loop)
	csitest.Must(t, err)
	defer func() { csitest.Must(t, program.Close()) }()
	const at = 63 * guesttest.MiB
	sees := func() []byte {
		b := make([]byte, 4096)
		_, err := program.ReadAt(b, at)
		csitest.Must(t, err)
		return b
	}
	kept, has := sees(), bytes.Repeat([]byte{7}, 4096)
	file, err := os.OpenFile(d.File, os.O_WRONLY, 0)
	csitest.Must(t, err)
	_, err = file.WriteAt(has, at)
	csitest.Must(t, err)
	csitest.Must(t, file.Close())
	if !bytes.Equal(sees(), kept) {
		t.Fatal("the kernel has not kept what it read")
	}
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(d.Serial)
	csitest.Must(t, err)
	device, err := host.OpenLocked(t.Context(), found, false)
	csitest.Must(t, err)
	defer func() { csitest.Must(t, device.Close()) }()
	csitest.Must(t, (&Preparation{Device: device}).finish(state{}))
	if !bytes.Equal(sees(), has) {
		t.Error("the kernel shows what it has kept, and not what is on the disk")
	}
}
