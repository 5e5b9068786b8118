package blockdev

import (
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
)

// A program that starts has a copy of every descriptor until it has begun, so a claim that is over
// could seem to be held still: by the mkfs of another volume.
func TestNoProgramThatStartsKeepsAClaim(t *testing.T) {
	g := guesttest.New(t)
	d := g.Attach("csi-0123456789abcdef", 64*guesttest.MiB)
	ds := Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := ds.Lookup(d.Serial)
	csitest.Must(t, err)
	held, err := ds.Open(found)
	csitest.Must(t, err)
	defer func() { _ = held.Close() }()
	over := make(chan struct{})
	var starting sync.WaitGroup
	for range 4 {
		starting.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					_ = exec.Command("true").Run()
				}
			}
		})
	}
	defer starting.Wait()
	defer close(over)
	for n, end := 0, time.Now().Add(2*time.Second); time.Now().Before(end); n++ {
		for name, claim := range map[string]func() error{
			"a claim": held.TryExclusive,
			"a write": func() error { return held.WithExclusive(func(*os.File) error { return nil }) },
		} {
			if err := claim(); err != nil {
				t.Fatalf("%s, number %d: %v", name, n, err)
			}
			if err := claimable(held.Path); err != nil {
				t.Fatalf("after %s, number %d: %v", name, n, err)
			}
		}
	}
}

// claimable says whether nobody holds the device, and is no reason itself why somebody would.
func claimable(path string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	return f.Close()
}
