//go:build linux

package loopdev_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
)

const mib = 1 << 20

func newFile(t *testing.T, size int64) string {
	t.Helper()
	looptest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "backing.img")
	looptest.Must(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)))
	t.Cleanup(func() { releaseBelow(t, filepath.Dir(path)) })
	return path
}

func releaseBelow(t *testing.T, dir string) int {
	t.Helper()
	devices, err := loopdev.DetachBelow(context.Background(), dir)
	if err != nil {
		t.Error(err)
	}
	return len(devices)
}

func attach(t *testing.T, c loopdev.Config) loopdev.Device {
	t.Helper()
	return looptest.Got(loopdev.Attach(t.Context(), c))(t)
}

// serial returns a serial that no other test or process uses.
func serial(t *testing.T) string {
	return "t" + strconv.FormatInt(time.Now().UnixNano(), 36) + strconv.Itoa(os.Getpid())
}

func find(t *testing.T, wanted func(loopdev.Device) bool) []loopdev.Device {
	t.Helper()
	return slices.DeleteFunc(looptest.Got(loopdev.List())(t),
		func(d loopdev.Device) bool { return !wanted(d) })
}

func mustFind(t *testing.T, serial string) []loopdev.Device {
	t.Helper()
	return find(t, func(d loopdev.Device) bool { return d.Serial == serial })
}

func TestADeviceWithAReusedNumberAcceptsWrites(t *testing.T) {
	const first = 7000 // no other test uses this number
	c := loopdev.Config{Path: newFile(t, mib), Serial: serial(t), First: first}
	d := attach(t, c)
	looptest.Command(t, "blockdev", "--setro", d.Path)
	looptest.Must(t, d.Detach(t.Context()))
	again := attach(t, c)
	if again.Path != d.Path {
		t.Fatalf("the device is %s, want %s as before", again.Path, d.Path)
	}
	dev := looptest.Got(os.OpenFile(again.Path, os.O_WRONLY, 0))(t)
	defer dev.Close()
	looptest.Got(dev.WriteAt(make([]byte, 512), 0))(t)
}

// The first device refuses discards. Detach must not leave this setting to the next device.
func TestADeviceWithAReusedNumberAcceptsDiscards(t *testing.T) {
	path := newFile(t, mib)
	first := attach(t, loopdev.Config{Path: path, Serial: "without", First: 700,
		NoDiscards: true})
	if err := exec.Command("blkdiscard", "--force", first.Path).Run(); err == nil {
		t.Error("a device with NoDiscards accepts a discard")
	}
	looptest.Must(t, first.Detach(t.Context()))
	_ = os.Remove(first.Path) // the kernel removes no device node that another program has made
	looptest.Must(t, first.Detach(t.Context()))
	if _, err := os.Stat(first.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a second Detach has made a node: %v", err)
	}
	next := attach(t, loopdev.Config{Path: path, Serial: "any", First: first.Number})
	looptest.Command(t, "blkdiscard", "--force", next.Path)
}

func TestAttachRefusesInvalidConfigurationsAndFiles(t *testing.T) {
	file, dir, page := newFile(t, mib), t.TempDir(), os.Getpagesize()
	odd := newFile(t, 1000)
	fifo := filepath.Join(dir, "fifo")
	looptest.Must(t, unix.Mkfifo(fifo, 0o600))
	for name, c := range map[string]loopdev.Config{
		"no serial":                      {Path: file},
		"a serial with a NUL":            {Path: file, Serial: "a\x00b"},
		"a serial of 64 bytes":           {Path: file, Serial: strings.Repeat("s", 64)},
		"an owner with a NUL":            {Path: file, Serial: "x", Owner: "a\x00b"},
		"an owner that does not fit":     {Path: file, Serial: "x", Owner: strings.Repeat("o", 62)},
		"a block size of 1000":           {Path: file, Serial: "x", BlockSize: 1000},
		"a block size of 256":            {Path: file, Serial: "x", BlockSize: 256},
		"a block size above the page":    {Path: file, Serial: "x", BlockSize: 2 * page},
		"a negative limit":               {Path: file, Serial: "x", SizeLimit: -512},
		"a limit of half a block":        {Path: file, Serial: "x", SizeLimit: 512, BlockSize: 1024},
		"a directory":                    {Path: dir, Serial: "x"},
		"a FIFO":                         {Path: fifo, Serial: "x"},
		"a device":                       {Path: "/dev/null", Serial: "x"},
		"a missing file":                 {Path: filepath.Join(dir, "none"), Serial: "x"},
		"a file of 1000 bytes":           {Path: odd, Serial: "x"},
		"a read-only file of 1000 bytes": {Path: odd, Serial: "x", ReadOnly: true},
	} {
		t.Run(name, func(t *testing.T) {
			if d, err := loopdev.Attach(t.Context(), c); err == nil {
				t.Errorf("Attach(%+v) = %+v, want an error", c, d)
			}
		})
	}
	if n := releaseBelow(t, filepath.Dir(file)); n != 0 {
		t.Errorf("%d refused devices were left attached", n)
	}
}

func TestARepeatedDetachKeepsANewAttachment(t *testing.T) {
	file := newFile(t, mib)
	old := attach(t, loopdev.Config{Path: file, Serial: serial(t)})
	looptest.Must(t, old.Detach(t.Context()))
	// The new attachment has the same file and serial. Only its sequence number is certain to differ.
	current := attach(t, loopdev.Config{Path: file, Serial: old.Serial})
	stale := current
	stale.Sequence = old.Sequence
	if err := stale.Detach(t.Context()); err != nil {
		t.Errorf("a second Detach = %v, want success: it is detached", err)
	}
	if err := stale.Sync(); !errors.Is(err, loopdev.ErrGone) {
		t.Errorf("Sync of a gone attachment = %v, want ErrGone", err)
	}
	if found := mustFind(t, current.Serial); len(found) != 1 {
		t.Errorf("the later attachment was released by the Detach of the earlier: %+v", found)
	}
}

func TestDetachWaitsForOtherUsersOfTheDevice(t *testing.T) {
	d := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t)})
	holder := looptest.Got(os.Open(d.Path))(t)
	defer holder.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.Detach(ctx); !errors.Is(err, loopdev.ErrBusy) {
		t.Fatalf("Detach of a held device = %v, want ErrBusy", err)
	}
	if found := mustFind(t, d.Serial); len(found) != 1 {
		t.Errorf("the held device is not listed any more: %+v", found)
	}
	done := make(chan error)
	go func() { done <- d.Detach(t.Context()) }()
	holder.Close()
	if err := <-done; err != nil {
		t.Errorf("Detach while the holder left = %v, want success", err)
	}
}

func TestListFindsADeviceWhoseNodeIsMissing(t *testing.T) {
	file, sn := newFile(t, mib), serial(t)
	d := attach(t, loopdev.Config{Path: file, Serial: sn})
	looptest.Must(t, os.Remove(d.Path))
	if found := mustFind(t, sn); len(found) != 1 {
		t.Errorf("without its node the device is not found: %+v", found)
	}
	looptest.Must(t, d.Detach(t.Context()))
}

func serveAs(t *testing.T, name string, content flakydisk.Store) (served loopdev.Device,
	end func() error) {
	t.Helper()
	looptest.NeedRoot(t)
	server := looptest.Got(flakydisk.Mount(t.TempDir()))(t)
	end = sync.OnceValue(server.Close)
	t.Cleanup(func() { _ = end() })
	served = attach(t, loopdev.Config{Path: server.Put(name, flakydisk.NewDisk(content)),
		Serial: serial(t)})
	t.Cleanup(func() { _ = served.Detach(context.Background()) })
	return served, end
}

func orphaned(t *testing.T, d loopdev.Device) {
	t.Helper()
	all, err := loopdev.List()
	i := slices.IndexFunc(all, func(found loopdev.Device) bool { return found.Number == d.Number })
	if i < 0 || !all[i].Orphaned || all[i].Sequence != d.Sequence || all[i].Serial != "" ||
		filepath.Base(all[i].BackingFile) != "disk" {
		t.Errorf("the device %d of %+v is not an orphan with the file disk: %v", i, all, err)
	}
}

func TestListReportsAnOrphanIfTheBackingFilesystemWasShutDown(t *testing.T) {
	lower := attach(t, loopdev.Config{Path: newFile(t, 320*mib), Serial: serial(t)})
	looptest.Command(t, "mkfs.xfs", "-q", lower.Path)
	dir := t.TempDir()
	looptest.Must(t, unix.Mount(lower.Path, dir, "xfs", 0, ""))
	defer func() { looptest.Must(t, unix.Unmount(dir, 0)) }()
	file := filepath.Join(dir, "disk")
	f := looptest.Got(os.Create(file))(t)
	defer f.Close()
	looptest.Must(t, f.Truncate(8*mib))
	upper := attach(t, loopdev.Config{Path: file, Serial: serial(t)})
	const shutdown, withoutLog = 0x8004587d, 2 // FS_IOC_SHUTDOWN of the kernel's XFS
	looptest.Must(t, unix.IoctlSetPointerInt(int(f.Fd()), shutdown, withoutLog))
	orphaned(t, upper)
	if err := upper.Detach(t.Context()); err != nil {
		t.Errorf("Detach = %v", err)
	}
}

// waiting is a disk's content. After on.Store(true), Size waits until the channel goOn is closed.
type waiting struct {
	*flakydisk.Image
	on      atomic.Bool
	reached chan struct{}
	goOn    chan struct{}
}

func (w *waiting) Size() int64 {
	if w.on.Load() {
		select {
		case w.reached <- struct{}{}:
		case <-w.goOn:
		}
		<-w.goOn
	}
	return w.Image.Size()
}

func TestListReportsAnOrphanIfTheFUSEServerEndsDuringTheCall(t *testing.T) {
	content := &waiting{Image: flakydisk.NewImage(8 * mib), reached: make(chan struct{}),
		goOn: make(chan struct{})}
	served, end := serveAs(t, "disk", content)
	content.on.Store(true)
	listed := make(chan struct{})
	go func() {
		defer close(listed)
		orphaned(t, served)
	}()
	<-content.reached
	defer close(content.goOn)
	looptest.Must(t, end())
	<-listed
}

// leaver is the environment variable that tells the child process which file to attach.
const leaver = "LOOPDEV_TEST_LEAVES"

func TestOnlyDevicesOfDeadProcessesAreReleased(t *testing.T) {
	if file := os.Getenv(leaver); file != "" {
		leave(t, file)
	}
	dir := t.TempDir()
	t.Cleanup(func() { releaseBelow(t, dir) })
	file, mountpoint := filepath.Join(dir, "disk"), filepath.Join(dir, "mounted")
	looptest.Must(t, errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 8*mib),
		os.Mkdir(mountpoint, 0o755)))
	looptest.Command(t, "mkfs.ext4", "-q", file)
	process := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	process.Env = append(os.Environ(), leaver+"="+file)
	process.Stderr = os.Stderr
	in, inErr := process.StdinPipe()
	out, outErr := process.StdoutPipe()
	looptest.Must(t, errors.Join(inErr, outErr))
	defer in.Close()
	looptest.Must(t, process.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	dead := strings.Fields(line)
	if err != nil || len(dead) != 2 {
		_ = process.Process.Kill()
		t.Fatalf("the process prints %q, %v; want its serial and its device", line, err)
	}
	looptest.Must(t, unix.Mount(dead[1], mountpoint, "ext4", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(mountpoint, unix.MNT_DETACH) })

	own := attachIn(t, filepath.Join(dir, "own"))
	living := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: loopdev.Process() + ".1"})
	foreign := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: "p.1.1.1"}) // a process of another PID namespace
	rack := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t), Owner: "RACK"})
	// The child process still lives. dead[0] is the serial of its device.
	if left := detachLeft(t); slices.Contains(left, dead[0]) {
		t.Errorf("released %s of a process that lives", dead[0])
	}
	looptest.Must(t, process.Process.Kill())
	_ = process.Wait() // It was killed.
	if left := detachLeft(t); !slices.Contains(left, dead[0]) {
		t.Errorf("released %q, want %s of the process that was killed", left, dead[0])
	}
	if found := mustFind(t, dead[0]); len(found) > 0 {
		t.Errorf("the device of the process that was killed is there: %+v", found)
	}
	for _, d := range []loopdev.Device{own, living, foreign, rack} {
		if found := mustFind(t, d.Serial); len(found) != 1 || found[0].Sequence != d.Sequence ||
			found[0].Releasing {
			t.Errorf("the device %s of %q has changed: %+v", d.Path, d.Owner, found)
		}
	}
}

func leave(t *testing.T, file string) {
	d := attach(t, loopdev.Config{Path: file, Serial: serial(t), Owner: loopdev.Process()})
	looptest.Got(os.Stdout.WriteString(d.Serial + " " + d.Path + "\n"))(t)
	_, err := io.ReadAll(os.Stdin)
	t.Fatalf("the process was to be killed, and its input has ended: %v", err)
}

func detachLeft(t *testing.T) (serials []string) {
	t.Helper()
	left, err := loopdev.DetachLeft(context.Background())
	if err != nil {
		t.Logf("DetachLeft: %v", err)
	}
	for _, d := range left {
		serials = append(serials, d.Serial)
	}
	return serials
}

func TestTheOwnerOfAnOrphanIsReadFromItsFileName(t *testing.T) {
	for name, released := range map[string]bool{
		// The owner is an earlier process with the PID 1, which has ended.
		"p." + strings.Split(loopdev.Process(), ".")[1] + ".1.zzzzz.disk-1": true,
		loopdev.Process() + ".disk-1":                                       false,
		"disk-1":                                                            false,
	} {
		t.Run(name, func(t *testing.T) {
			served, end := serveAs(t, name, flakydisk.NewImage(8*mib))
			looptest.Must(t, end())
			detachLeft(t)
			left := len(find(t, func(d loopdev.Device) bool { return d.Sequence == served.Sequence })) > 0
			if left == released {
				t.Errorf("the device of the file %q is there: %t, want %t", name, left, !released)
			}
		})
	}
}

func attachIn(t *testing.T, dir string) loopdev.Device {
	t.Helper()
	path := filepath.Join(dir, "disk")
	looptest.Must(t, os.MkdirAll(dir, 0o755))
	looptest.Must(t, os.Rename(newFile(t, mib), path))
	t.Cleanup(func() { releaseBelow(t, dir) })
	return attach(t, loopdev.Config{Path: path, Serial: serial(t)})
}

func attachNode(t *testing.T, dir string, lower loopdev.Device) (upper loopdev.Device) {
	t.Helper()
	node := filepath.Join(dir, "node")
	looptest.Must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(lower.Major, lower.Minor))))
	path := looptest.Command(t, "losetup", "--find", "--show", node)
	t.Cleanup(func() { releaseBelow(t, dir) })
	return find(t, func(d loopdev.Device) bool { return d.Path == strings.TrimSpace(path) })[0]
}

func TestDetachBelowReleasesOnlyDevicesBelowTheDirectory(t *testing.T) {
	dir, elsewhere := filepath.Join(t.TempDir(), "work"), t.TempDir()
	inside := attachIn(t, filepath.Join(dir, "rack", "disks"))
	outside := attachIn(t, dir+"-2")
	upper := attachNode(t, dir, inside)
	looptest.Must(t, os.Rename(newFile(t, mib), filepath.Join(dir, "file")))
	looptest.Must(t, unix.Mount(dir, elsewhere, "", unix.MS_BIND, ""))
	c := loopdev.Config{Serial: (serial(t) + strings.Repeat("s", 51))[:51], Owner: "who made it",
		Path: filepath.Join(elsewhere, "file"), BlockSize: 4096, ReadOnly: true} // longest allowed texts
	hidden, err := loopdev.Attach(t.Context(), c)
	// After the unmount, c.Path leads to no file, as if a container had attached the device.
	looptest.Must(t, errors.Join(err, unix.Unmount(elsewhere, unix.MNT_DETACH)))
	if hidden.Serial != c.Serial || hidden.Owner != c.Owner || hidden.BlockSize != c.BlockSize ||
		!hidden.ReadOnly || hidden.SizeBytes != mib {
		t.Errorf("Attach(%+v) = %+v", c, hidden)
	}
	if path := mustFind(t, hidden.Serial)[0].BackingFile; strings.HasPrefix(path, dir+"/") {
		t.Fatalf("the kernel reports %s, want a path outside %s", path, dir)
	}
	found := looptest.Got(loopdev.DetachBelow(t.Context(), dir))(t)
	byPath := cmpopts.SortSlices(func(a, b loopdev.Device) bool { return a.Path < b.Path })
	if diff := cmp.Diff([]loopdev.Device{inside, upper, hidden}, found, byPath,
		cmpopts.IgnoreFields(loopdev.Device{}, "BackingFile")); diff != "" {
		t.Errorf("DetachBelow differs from what was attached below (-attached +found):\n%s", diff)
	}
	for _, d := range []loopdev.Device{inside, upper, hidden} {
		if left := mustFind(t, d.Serial); len(left) != 0 {
			t.Errorf("after DetachBelow there is %+v", left)
		}
	}
	if left := mustFind(t, outside.Serial); len(left) != 1 {
		t.Errorf("DetachBelow(%s) released %s", dir, outside.BackingFile)
	}
}

func TestADeviceReportsWhetherItIsStackedOnAnotherDevice(t *testing.T) {
	own, foreign := attachIn(t, t.TempDir()), attachIn(t, t.TempDir())
	upper := attachNode(t, t.TempDir(), own) // as a kubelet does for a raw block volume
	if !upper.On(own) || upper.On(foreign) || own.On(foreign) || own.On(own) {
		t.Errorf("%s with the number %x is on its own device: %t, on another one: %t; its own device is "+
			"on another one: %t", upper.Path, upper.BackingNumber, upper.On(own), upper.On(foreign),
			own.On(foreign))
	}
}
