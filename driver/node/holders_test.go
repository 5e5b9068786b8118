//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// opening starts a process that has a file open in that way, "<" or "<>".
func opening(t *testing.T, how, path string) *neighbour {
	t.Helper()
	script := `exec 3` + how + `"$1"; echo ready; read -r x || true`
	return startNeighbour(t, "sh", "-c", script, "sh", path)
}

func TestNU5WhoHoldsADeviceIsNamed(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	must(t, unix.Unmount(v.staging(), 0)) // and there the driver dies
	holders := filepath.Join(v.guest.Dir, "sys/block", v.disk.Name, "holders")
	must(t, os.MkdirAll(filepath.Join(holders, "dm-7"), 0o755))
	mapper, err := os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	n := opening(t, "<", v.disk.Loop)
	v.held("dm-7", fmt.Sprintf("process %d (sh)", n.pid))
	v.held("dm-7") // a restarted driver still asks
	must(t, mapper.Close())
	must(t, v.unstage())
	if got := v.guest.records(); len(got) != 0 {
		t.Errorf("records left: %q", got)
	}
}

func TestNU5ARawDeviceThatIsOpenForWritingIsNotReleased(t *testing.T) {
	v := statefulGuest(t).disk(8, "block")
	must(t, v.stage())
	must(t, v.publish("dev"))
	// As a container has it: by a node of its own, which is no mount.
	node := filepath.Join(v.guest.Dir, "the pod's node")
	var st unix.Stat_t
	must(t, unix.Stat(v.disk.Loop, &st))
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)))
	reader, writer := opening(t, "<", node), opening(t, "<>", node)
	must(t, v.unpublish("dev"))
	v.held(fmt.Sprintf("process %d (sh)", writer.pid))
	writer.leave()
	must(t, v.unstage()) // to read is harmless
	reader.leave()
}

// kernelUse makes the kernel use the device of a node. It returns what ends the use, and what the
// error has to name.
type kernelUse func(t *testing.T, v testVolume, node string) (end func(), names []string)

var kernelUsers = map[string]kernelUse{
	"a loop device over the published file, with a filesystem that is mounted": func(t *testing.T,
		v testVolume, node string) (func(), []string) {
		loop := loopOver(t, node)
		unmount := mountedOn(t, v.guest, loop)
		return func() { unmount(); detach(t, loop) }, []string{filepath.Base(loop), "by hand"}
	},
	"a loop device from an offset, over a bind of the file": func(t *testing.T, v testVolume,
		node string) (func(), []string) {
		bind := v.guest.path("bind")
		must(t, os.WriteFile(bind, nil, 0o600))
		must(t, unix.Mount(node, bind, "", unix.MS_BIND, ""))
		loop := loopOver(t, bind, "--offset", "1048576")
		must(t, unix.Unmount(bind, unix.MNT_DETACH)) // as when a pod's namespace ends
		return func() { detach(t, loop) }, []string{filepath.Base(loop)}
	},
	"a loop device over a loop device over a node of the pod's own": func(t *testing.T, v testVolume,
		node string) (func(), []string) {
		lower := loopOver(t, ownNode(t, v.guest, node))
		upper := loopOver(t, lower)
		n := opening(t, "<>", upper)
		return func() { n.leave(); detach(t, upper); detach(t, lower) }, []string{filepath.Base(lower),
			filepath.Base(upper), fmt.Sprintf("process %d (sh)", n.pid)}
	},
	"a filesystem on a loop device that was unmounted lazily": func(t *testing.T, v testVolume,
		node string) (func(), []string) {
		loop := loopOver(t, node)
		unmount := mountedOn(t, v.guest, loop)
		n := opening(t, "<", v.guest.path("by hand"))
		must(t, unix.Unmount(v.guest.path("by hand"), unix.MNT_DETACH))
		return func() { n.leave(); unmount(); detach(t, loop) }, []string{filepath.Base(loop)}
	},
	"a partition that is mounted": func(t *testing.T, v testVolume, node string) (func(), []string) {
		part, end := partition(t, node)
		unmount := mountedOn(t, v.guest, part)
		return func() { unmount(); end() }, []string{filepath.Base(part), "by hand"}
	},
	"a partition that is open for writing": func(t *testing.T, v testVolume, node string) (func(),
		[]string) {
		part, end := partition(t, node)
		n := opening(t, "<>", part)
		return func() { n.leave(); end() }, []string{fmt.Sprintf("process %d (sh)", n.pid)}
	},
	"a loop device over a partition": func(t *testing.T, v testVolume, node string) (func(),
		[]string) {
		part, end := partition(t, node)
		loop := loopOver(t, part)
		return func() { detach(t, loop); end() }, []string{filepath.Base(loop), filepath.Base(part)}
	},
	"swap": func(t *testing.T, v testVolume, _ string) (func(), []string) {
		node := v.disk.Loop // a path that /proc/swaps does not escape
		guesttest.Run(t, "mkswap", node)
		guesttest.Run(t, "swapon", node)
		return func() { guesttest.Run(t, "swapoff", node) }, []string{"as swap"}
	},
}

func loopOver(t *testing.T, path string, args ...string) string {
	t.Helper()
	loop := strings.TrimSpace(guesttest.Run(t, "losetup", append([]string{"--find", "--show", path},
		args...)...))
	sequence := filepath.Join("/sys/block", filepath.Base(loop), "diskseq")
	own, err := os.ReadFile(sequence)
	must(t, err)
	t.Cleanup(func() {
		// The test may have detached it, and then the number may be another process's.
		if now, err := os.ReadFile(sequence); err == nil && bytes.Equal(now, own) {
			_ = exec.Command("losetup", "--detach", loop).Run()
		}
	})
	return loop
}

func detach(t *testing.T, loop string) { guesttest.Run(t, "losetup", "--detach", loop) }

// mountedOn makes a filesystem on a device and mounts it by hand.
func mountedOn(t *testing.T, g *testGuest, device string) (unmount func()) {
	t.Helper()
	guesttest.Run(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
	at := g.path("by hand")
	must(t, os.Mkdir(at, 0o700))
	guesttest.Run(t, "mount", device, at)
	return func() { _ = unix.Unmount(at, 0) }
}

func ownNode(t *testing.T, g *testGuest, of string) string {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(of, &st))
	must(t, unix.Mknod(g.path("node"), unix.S_IFBLK|0o600, int(st.Rdev)))
	return g.path("node")
}

// partition makes a partition in the disk of a node, as a table that is read does.
func partition(t *testing.T, node string) (part string, remove func()) {
	t.Helper()
	f, err := os.Open(node)
	must(t, err)
	defer func() { _ = f.Close() }()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	must(t, err)
	info.Flags |= unix.LO_FLAGS_PARTSCAN // else the kernel has no partitions of a loop device
	must(t, unix.IoctlLoopSetStatus64(int(f.Fd()), info))
	loop := fmt.Sprintf("/dev/loop%d", info.Number)
	guesttest.Run(t, "addpart", loop, "1", "2048", "8192")
	return loop + "p1", func() { guesttest.Run(t, "delpart", loop, "1") }
}

func TestNU5WhatTheKernelUsesADeviceForKeepsIt(t *testing.T) {
	names := slices.Sorted(maps.Keys(kernelUsers))
	for _, name := range short.Some(t, 3, names) {
		use := kernelUsers[name]
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(16, "block")
			must(t, v.stage())
			must(t, v.publish("dev"))
			end, names := use(t, v, v.guest.path("dev"))
			err := v.unpublish("dev") // which the kernel refuses if the use is by the mount's path
			if err == nil {
				err = v.unstageSoon()
			}
			csitest.Want(t, err, codes.Internal, csierr.StillMounted, names...)
			end()
			must(t, v.unpublish("dev"))
			must(t, v.unstage())
		})
		t.Run(name+", over a disk for a filesystem", func(t *testing.T) {
			v := statefulGuest(t).disk(16, volume.Ext4)
			end, _ := use(t, v, v.disk.Loop)
			before := v.disk.Digest(t)
			err := v.stage()
			if !csierr.Has(err, csierr.DeviceHeld) && !csierr.Has(err, csierr.DiskNotBlank) ||
				v.disk.Digest(t) != before {
				t.Errorf("it was staged or written to: %v", err)
			}
			end()
		})
	}
}

// What cannot be asked may say so with the error of a device that is gone.
func TestNU5WhatCannotBeAskedIsNotTakenForGone(t *testing.T) {
	serve := func(t *testing.T) (*flakydisk.Server, *flakydisk.Disk, string) {
		t.Helper()
		dir := t.TempDir()
		server, err := flakydisk.Mount(dir)
		must(t, err)
		t.Cleanup(func() { must(t, server.Close()) })
		disk := flakydisk.NewDisk(flakydisk.NewImage(64 * guesttest.MiB))
		return server, disk, server.Put("disk", disk)
	}
	t.Run("a loop device whose backing file's server is dead", func(t *testing.T) {
		v := statefulGuest(t).disk(8, "block")
		must(t, v.stage())
		server, _, file := serve(t)
		loop := loopOver(t, file)
		must(t, server.Close())
		v.held(filepath.Base(loop))
		detach(t, loop)
		must(t, v.unstage())
	})
	t.Run("a disk in use that cannot be read", func(t *testing.T) {
		g := statefulGuest(t)
		_, disk, file := serve(t)
		v := g.volume(g.AttachFile(guesttest.Serial, file), volume.Ext4)
		must(t, v.stage())
		must(t, unix.Unmount(v.staging(), 0)) // and there the driver dies
		user, err := os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
		must(t, err)
		disk.AddFault(flakydisk.Fault{On: flakydisk.OnRead})
		v.held(v.disk.Name)
		must(t, user.Close())
		disk.Heal()
		must(t, v.unstage())
	})
}

func TestAMountWhoseWritesFailIsTakenDown(t *testing.T) {
	t.Run("what was not written is told beside whatever else fails", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		must(t, v.stage())
		must(t, os.WriteFile(filepath.Join(v.staging(), "x"), make([]byte, 4*guesttest.MiB), 0o600))
		must(t, os.Truncate(v.disk.File, 0))
		f, err := os.Open(filepath.Join(v.staging(), "x"))
		must(t, err)
		err = v.unstage()
		must(t, f.Close())
		csitest.Want(t, err, codes.Internal, csierr.StillMounted, "could not be written out")
		_ = v.unstage() // now the filesystem may have noticed, or not
		must(t, v.unstage())
	})
	t.Run("nothing is told of a disk that was taken away", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		must(t, v.stage())
		must(t, os.WriteFile(filepath.Join(v.staging(), "x"), make([]byte, 4*guesttest.MiB), 0o600))
		must(t, os.Truncate(v.disk.File, 0))
		v.guest.Unplug(v.disk)
		must(t, v.unstage())
		if !strings.Contains(v.guest.log.String(), "could not be written out") {
			t.Error("every write was done")
		}
	})
	t.Run("each workload of a raw device hears what was not written", func(t *testing.T) {
		g := statefulGuest(t)
		small := smallTmpfs(t, guesttest.MiB)
		v := g.volume(g.AttachFile(guesttest.Serial, sparse(t, small, 8*guesttest.MiB)), "block")
		n := g.node()
		must(t, csitest.Call(t.Context(), n, v.stageRequest()))
		unpublish := func() error { return csitest.Call(t.Context(), n, v.unpublishRequest("dev")) }
		for range 2 {
			must(t, csitest.Call(t.Context(), n, v.publishRequest("dev")))
			device, err := os.OpenFile(g.path("dev"), os.O_WRONLY, 0)
			must(t, err)
			_, err = device.WriteAt(make([]byte, 4*guesttest.MiB), 0)
			must(t, errors.Join(err, device.Close()))
			csitest.Want(t, unpublish(), codes.Internal, csierr.NodeToolFailed)
			must(t, unpublish())
			must(t, unpublish())
		}
		for range 2 {
			must(t, csitest.Call(t.Context(), n, v.unstageRequest()))
		}
	})
}

func TestAReadOnlySwitchThatADeadDriverLeftIsTakenBack(t *testing.T) {
	readOnly := func(v testVolume) bool {
		return strings.TrimSpace(guesttest.Run(t, "blockdev", "--getro", v.disk.Loop)) == "1"
	}
	for name, finish := range map[string]func(v testVolume) error{
		"by unpublish": func(v testVolume) error { return v.unpublish("dev") },
		"by unpublish, where the target's directory is gone": func(v testVolume) error {
			return v.unpublish("no/such/dev")
		},
		"by unstage": testVolume.unstage,
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(8, "block")
			must(t, v.stage())
			must(t, v.publishReadOnly("dev"))
			must(t, unix.Unmount(v.guest.path("dev"), 0)) // and there the driver dies
			if !readOnly(v) {
				t.Fatal("the device can be written already")
			}
			must(t, finish(v))
			if readOnly(v) {
				t.Fatal("the device is still read-only")
			}
		})
	}
	t.Run("but not while another workload has the volume", func(t *testing.T) {
		v := statefulGuest(t).disk(8, "block")
		v.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		must(t, v.stage())
		must(t, v.publishReadOnly("dev"))
		must(t, v.publishReadOnly("other"))
		must(t, unix.Unmount(v.guest.path("dev"), 0))
		must(t, v.unpublish("dev"))
		if !readOnly(v) {
			t.Fatal("the other workload's device can be written")
		}
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
		must(t, v.unpublish("other"))
		must(t, v.unstage())
		if readOnly(v) {
			t.Fatal("the device is still read-only")
		}
	})
}
