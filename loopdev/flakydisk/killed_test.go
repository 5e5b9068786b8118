//go:build linux

package flakydisk_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// stuckAt is the environment variable with a directory in which this program serves a disk, to
// which it then writes.
const stuckAt = "FLAKYDISK_STUCK_AT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(stuckAt); dir != "" {
		fmt.Fprintln(os.Stderr, "a write to a disk that hangs has ended:", waitForItself(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// stuck is the content of a disk on which no write ever completes.
type stuck struct {
	*flakydisk.Image
	reached func()
}

// WriteAt does not return.
func (s stuck) WriteAt([]byte, int64) (int, error) {
	s.reached()
	select {}
}

// waitForItself writes to a disk that it serves, and prints the device when the disk hangs. From
// then on one of its threads waits, and no signal interrupts it.
func waitForItself(dir string) error {
	server, err := flakydisk.Mount(dir)
	if err != nil {
		return err
	}
	var loop loopdev.Device
	content := stuck{flakydisk.NewImage(8 * mib), func() {
		_ = json.NewEncoder(os.Stdout).Encode(loop)
	}}
	loop, err = loopdev.Attach(context.Background(), loopdev.Config{
		Path: server.Put("disk", flakydisk.NewDisk(content)), Serial: "stuck"})
	if err != nil {
		return err
	}
	device, err := os.OpenFile(loop.Path, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = device.Write([]byte("x"))
	return err
}

func TestAKilledServerLeavesNoHangingProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `it's $(a) "directory"; `)
	must(t, os.Mkdir(dir, 0o700))
	server := exec.Command(os.Args[0])
	server.Env, server.Stderr = append(os.Environ(), stuckAt+"="+dir), os.Stderr
	out, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	must(t, err)
	var loop loopdev.Device
	t.Cleanup(func() {
		if t.Failed() {
			_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)
			_ = loop.Detach(context.Background())
		}
	})
	if err := json.NewDecoder(out).Decode(&loop); err != nil {
		t.Fatalf("the server's disk does not get stuck: %v", err)
	}
	must(t, server.Process.Kill())
	within(t, "the server ends", func() error {
		if err := server.Wait(); server.ProcessState.Exited() {
			return err
		}
		return nil
	})
	within(t, "its mount goes", func() error {
		for {
			// The mount table shows the mount without a request to the server.
			mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(dir))
			if err != nil || len(mounts) == 0 {
				return err
			}
			<-time.After(time.Millisecond)
		}
	})
	within(t, "the loop devices are listed", func() error {
		_, err := loopdev.List()
		return err
	})
	within(t, "its device is detached", func() error { return loop.Detach(t.Context()) })
}

func within(t *testing.T, what string, do func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: not within 20 s", what)
	}
}
