//go:build linux

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// acknowledged writes files of which each is flushed, as a database does, and returns what they
// hold.
func (v testVolume) acknowledged() map[string]string {
	files := map[string]string{"first": "1", "second": "2", "last": "3"}
	for path, text := range files {
		f, err := os.Create(filepath.Join(v.staging(), path))
		must(v.guest.t, err)
		_, err = f.WriteString(text)
		must(v.guest.t, errors.Join(err, f.Sync(), f.Close()))
	}
	return files
}

// The copies are taken of a disk in use, of a frozen filesystem and of a disk that was unstaged.
// The kernel replays no log on a disk that it cannot write; a frozen xfs has one, too.
func TestACopyHasWhatWasFlushedOrIsNotShown(t *testing.T) {
	trials, missing := 0, 0
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		v := statefulGuest(t).disk(320, fsType)
		must(t, v.stage())
		flushed, files := v.acknowledged(), map[string]string{}
		files["live"] = v.disk.Copy(t)
		v.freeze("staging " + v.Name)
		files["frozen"] = v.disk.Copy(t)
		must(t, v.unstage())
		v.guest.Unplug(v.disk)
		files["unstaged"] = v.disk.Copy(t)
		// use stages, checks and unstages a copy, and returns the error of the stage.
		use := func(t *testing.T, file string, readOnly bool, as ...guesttest.Option) error {
			c := v.guest.volume(v.guest.AttachFile("csi-restored00000000", file, as...), fsType)
			defer v.guest.Unplug(c.disk)
			before := c.disk.Digest(t)
			if readOnly {
				c.Tag = map[string]string{volume.CtxReadOnly: "true"}
			}
			err := c.stage()
			if trials++; err == nil {
				for path, want := range flushed {
					if b, err := os.ReadFile(filepath.Join(c.staging(), path)); string(b) != want {
						missing++
						t.Errorf("the flushed file %s reads %q, %v", path, b, err)
					}
				}
				var st unix.Statfs_t
				must(t, unix.Statfs(c.staging(), &st))
				if size := int64(st.Blocks) * st.Bsize; size < c.disk.SizeBytes*3/4 {
					t.Errorf("the filesystem has %d bytes of the disk's %d", size, c.disk.SizeBytes)
				}
			} else if got := guesttest.Mounts(t, c.staging()); len(got) != 0 {
				t.Errorf("a refused stage has mounted %q", got)
			}
			must(t, c.unstage())
			if readOnly && c.disk.Digest(t) != before {
				t.Error("the read-only disk was written")
			}
			return err
		}
		for state, file := range files {
			t.Run("E-6 NS-13 "+fsType+" "+state, func(t *testing.T) {
				for _, as := range [][]guesttest.Option{{guesttest.ReadOnly}, nil} {
					// Without the option the disk looks writable, as a guest's NVMe device may.
					err := use(t, file, true, as...)
					if state == "live" || state == "frozen" && fsType == volume.XFS {
						csitest.Want(t, err, codes.FailedPrecondition, csierr.LogNotReplayed)
					} else {
						must(t, err)
					}
				}
				larger := (&guesttest.Disk{File: file}).Copy(t)
				must(t, os.Truncate(larger, guesttest.GiB))
				must(t, use(t, larger, false))
				must(t, use(t, larger, false)) // there is nothing to grow
				must(t, use(t, file, false))
				must(t, use(t, file, true)) // the log was replayed
			})
		}
	}
	fmt.Printf("FIGURE acknowledged trials=%d missing=%d\n", trials, missing)
}

func TestRestoredVolumes(t *testing.T) {
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		t.Run("NS-14 a "+fsType+" filesystem is mounted next to its origin, each with its own data",
			func(t *testing.T) {
				g := newGuest(t)
				origin := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), fsType)
				must(t, origin.stage())
				must(t, origin.unstage())
				file := origin.disk.Copy(t)
				// The origin becomes the newer of the two, which btrfs remembers.
				must(t, origin.stage())
				must(t, os.WriteFile(filepath.Join(origin.staging(), "who"), []byte("origin"), 0o600))
				must(t, origin.unstage())

				restored := g.volume(g.AttachFile("csi-restored00000000", file), fsType)
				must(t, restored.stage())
				must(t, origin.stage())
				must(t, os.WriteFile(filepath.Join(restored.staging(), "who"), []byte("copy"), 0o600))
				b, err := os.ReadFile(filepath.Join(origin.staging(), "who"))
				if must(t, err); string(b) != "origin" {
					t.Fatalf("the origin reads %q", b)
				}
				must(t, origin.publish("a"))
				must(t, restored.publish("b"))
				must(t, origin.unpublish("a"))
				must(t, restored.unpublish("b"))
				must(t, restored.unstage())
				must(t, origin.unstage())
			})
	}
	t.Run("NS-11 what the kernel finds damaged is reported as such", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, smallest(volume.XFS)), volume.XFS)
		must(t, v.stage())
		must(t, v.unstage())
		const root = 64 << 10 // its inode
		v.disk.WriteAt(t, root+256, []byte("damage"))
		csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
	})
}

func TestABtrfsThatTheKernelTakesForItsTwinIsTakenDownBesideIt(t *testing.T) {
	for name, lost := range map[string]func(t *testing.T, g *testGuest, alias string){
		"the kernel has another path": func(*testing.T, *testGuest, string) {},
		"the kernel has a path that is gone": func(t *testing.T, _ *testGuest, alias string) {
			must(t, os.Remove(alias))
		},
		"nothing is recorded": func(t *testing.T, g *testGuest, _ string) {
			must(t, os.RemoveAll(g.state))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := statefulGuest(t)
			origin := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), volume.Btrfs)
			must(t, origin.stage())
			must(t, origin.unstage())
			restored := g.volume(g.AttachFile("csi-restored00000000", origin.disk.Copy(t)), volume.Btrfs)
			must(t, origin.stage())
			must(t, restored.stage())
			must(t, restored.publish("pod"))
			// After a commit, a scan of the copy by another path makes the kernel give it the twin's UUID.
			must(t, os.WriteFile(filepath.Join(restored.staging(), "who"), []byte("copy"), 0o600))
			guesttest.Run(t, "sync", "--file-system", restored.staging())
			alias := filepath.Join(t.TempDir(), "alias")
			guesttest.Run(t, "cp", "-a", restored.disk.Loop, alias)
			scanBtrfs(t, alias)
			lost(t, g, alias)

			must(t, restored.stage())
			must(t, restored.unpublish("pod"))
			must(t, restored.publish("pod"))
			must(t, origin.unpublish("pod"))
			must(t, restored.unpublish("pod"))
			must(t, restored.unstage())
			must(t, restored.exclusive())
			if _, err := os.Stat(filepath.Join(origin.staging(), "who")); !os.IsNotExist(err) {
				t.Fatalf("the origin's staging path shows the copy, or nothing: %v", err)
			}
			must(t, origin.unstage())
			must(t, origin.exclusive())
		})
	}
}

// scanBtrfs is btrfs device scan.
func scanBtrfs(t *testing.T, path string) {
	t.Helper()
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
	must(t, err)
	defer func() { _ = control.Close() }()
	const scanDevice = 0x50009404 // BTRFS_IOC_SCAN_DEV of include/uapi/linux/btrfs.h
	var arg [4096]byte            // fd, name
	copy(arg[8:], path)
	must(t, blockdev.Ioctl(int(control.Fd()), scanDevice, unsafe.Pointer(&arg)))
}
