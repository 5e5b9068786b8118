//go:build linux

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// stopOnce makes a call during which the program begins. It stops there until goOn, which returns
// the call's result.
func stopOnce(t *testing.T, program string, call func() error) (goOn func() error) {
	t.Helper()
	begun, file := filepath.Join(t.TempDir(), "begun"), filepath.Join(t.TempDir(), "go on")
	tools(t, map[string]string{program: fmt.Sprintf(`if mkdir '%s' 2>/dev/null; then
while [ ! -e '%s' ]; do sleep 0.01; done; fi; "$real" "$@"`, begun, file)})
	called := async.Start(func() (struct{}, error) { return struct{}{}, call() })
	csitest.Await(t, program+" has begun", func() bool { return exists(begun) == nil })
	return func() error {
		must(t, os.WriteFile(file, nil, 0o600))
		_, err := called()
		return err
	}
}

func TestTwoDriversOfOneNodeDoNotWorkOnOneDevice(t *testing.T) { // NS-9, NU-6
	t.Run("while one makes the filesystem the other is refused, until it ends", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		goOn := stopOnce(t, "mke2fs", v.stage)
		csitest.Want(t, v.stage(), codes.Aborted, csierr.DeviceLocked, "(mke2fs)")
		csitest.Want(t, v.unstage(), codes.Aborted, csierr.DeviceLocked)
		alias := v // another volume of the same disk
		alias.ID, alias.Static = "by-hand", true
		csitest.Want(t, alias.stage(), codes.Aborted, csierr.DeviceLocked)
		if got := v.guest.records(); !slices.Equal(got, []string{recordFile(v.ID)}) {
			t.Errorf("the refused calls left the records %q", got)
		}
		must(t, goOn())
		must(t, v.stage())
		v.checkStaged(t)
	})
	t.Run("what a driver has started keeps the next one out after the driver's death",
		func(t *testing.T) {
			v := statefulGuest(t).disk(64, volume.Ext4)
			outlives := lockedProgram(t, v)
			for name, call := range map[string]func() error{
				"stage": v.stage, "publish": func() error { return v.publish("pod") },
			} {
				err := call()
				csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked)
				if want := fmt.Sprintf("process %d (sleep)", outlives.Process.Pid); !strings.Contains(
					err.Error(), want) {
					t.Errorf("%s: the message does not say %q: %v", name, want, err)
				}
			}
			must(t, outlives.Process.Kill())
			_ = outlives.Wait()
			must(t, v.stage())
			v.checkStaged(t)
		})
	t.Run("with another state directory it is refused, too, for a disk that no workload gets raw",
		func(t *testing.T) {
			v := statefulGuest(t).disk(64, volume.Ext4)
			goOn := stopOnce(t, "mke2fs", v.stage)
			other, req := v.guest.node(), v.stageRequest()
			other.StateDir, req.StagingTargetPath = t.TempDir(), v.guest.path("another staging path")
			_, err := other.NodeStageVolume(t.Context(), req)
			must(t, goOn())
			csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked)
			v.checkStaged(t)
		})
	t.Run("without a state directory the device's own lock is waited for", func(t *testing.T) {
		v := newGuest(t).disk(64, volume.Ext4)
		node := filepath.Join(v.guest.Dir, "dev", v.disk.Name)
		f, err := os.Open(node)
		must(t, err)
		must(t, unix.Flock(int(f.Fd()), unix.LOCK_SH))
		staged := async.Start(func() (struct{}, error) { return struct{}{}, v.stage() })
		csitest.Await(t, "the call waits", func() bool { return ownDescriptors(t, node) > 1 })
		must(t, f.Close())
		_, err = staged()
		must(t, err)
	})
}

func TestAWorkloadsLockOfItsDeviceHoldsUpNoCall(t *testing.T) {
	v := statefulGuest(t).disk(16, "block")
	f, err := os.Open(v.disk.Loop)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	node, err := os.Open(filepath.Join(v.guest.Dir, "dev", v.disk.Name))
	must(t, err)
	t.Cleanup(func() { _ = node.Close() })
	for _, locked := range []*os.File{f, node} {
		must(t, unix.Flock(int(locked.Fd()), unix.LOCK_EX))
	}
	must(t, v.stage())
	must(t, v.publish("pod"))
	must(t, v.unpublish("pod"))
	must(t, v.unstage())
}

func TestNothingIsUnstagedWhileAnotherDriverOfTheNodeIsInTheMiddleOfAStage(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	v.guest.Unplug(v.disk)
	other := v.guest.node()
	other.DeviceTimeout = time.Minute
	staged := async.Start(func() (struct{}, error) {
		_, err := other.NodeStageVolume(t.Context(), v.stageRequest())
		return struct{}{}, err
	})
	locks := filepath.Join(v.guest.state, lockName)
	csitest.Await(t, "the stage has begun", func() bool { return ownDescriptors(t, locks) > 0 })
	csitest.Want(t, v.unstage(), codes.Aborted, csierr.DeviceLocked)
	csitest.Want(t, v.unpublish("pod"), codes.Aborted, csierr.DeviceLocked)
	v.guest.Plug(v.disk)
	_, err := staged()
	must(t, err)
	must(t, v.unstage())
	v.guest.hasMounts(0)
}

func TestLocksWorkAgainWhenTheirFileWasRemoved(t *testing.T) {
	g := statefulGuest(t)
	held, err := g.node().hold(t.Context(), "a volume")
	must(t, err)
	waiting := async.Start(func() (heldVolume, error) {
		return g.node().hold(t.Context(), "a volume")
	})
	locks := filepath.Join(g.state, lockName)
	csitest.Await(t, "the second waits", func() bool { return ownDescriptors(t, locks) > 1 })
	must(t, os.RemoveAll(g.state))
	must(t, held.lock.Close())
	second, err := waiting()
	must(t, err)
	_, err = g.node().hold(t.Context(), "a volume")
	csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked)
	must(t, second.lock.Close())
	third, err := g.node().hold(t.Context(), "a volume")
	must(t, err)
	must(t, third.lock.Close())
}

// ownDescriptors counts the descriptors of this process that are of the file.
func ownDescriptors(t *testing.T, path string) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && target == path {
			n++
		}
	}
	return n
}

// lockedProgram is a program that a driver had started on the volume's device before it died.
func lockedProgram(t *testing.T, v testVolume) *exec.Cmd {
	t.Helper()
	ds := v.guest.node().host()
	found, err := ds.Lookup(v.Name)
	must(t, err)
	h, err := ds.OpenLocked(t.Context(), found, false)
	must(t, err)
	cmd := exec.Command("sleep", "infinity")
	cmd.ExtraFiles = h.Inherited
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	must(t, h.Close())
	return cmd
}

func TestWhoWritesToADeviceIsNamed(t *testing.T) {
	v := newGuest(t).disk(64, volume.Ext4)
	writer := opening(t, "<>", v.disk.Loop)
	err := v.stage()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.DeviceHeld, fmt.Sprintf("process %d (sh)",
		writer.pid))
	writer.leave()
	must(t, v.stage())
}
