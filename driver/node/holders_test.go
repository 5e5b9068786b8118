//go:build linux

package node

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

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

// opening starts a process that keeps the file open, for reading ("<") or also for writing ("<>").
func opening(t *testing.T, how, path string) *neighbour {
	t.Helper()
	script := `exec 3` + how + `"$1"; echo ready; read -r x || true`
	return begin(t, exec.Command("sh", "-c", script, "sh", path))
}

func TestUnstageNamesTheUsersOfTheDevice(t *testing.T) { // NU-5
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	must(t, unix.Unmount(v.staging(), 0)) // as if the driver died here
	holders := filepath.Join(v.guest.Dir, "sys/block", v.disk.Name, "holders")
	must(t, os.MkdirAll(filepath.Join(holders, "dm-7"), 0o755))
	mapper := csitest.Got(os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0))(t)
	n := opening(t, "<", v.disk.Loop)
	v.held("dm-7", n.name("sh"))
	v.held("dm-7") // a restarted driver finds it, too
	must(t, mapper.Close())
	writer := opening(t, "<>", v.disk.Loop)
	v.held(writer.name("sh"))
	writer.leave()
	must(t, v.unstage())
	v.guest.hasRecords()
}

// Each of kernelUsers begins to use the device, and returns what the driver's error must name.
var kernelUsers = map[string]func(v testVolume, node string) (end func(), names []string){
	"a loop device over the published file, with a mounted filesystem": func(v testVolume,
		node string) (func(), []string) {
		loop, detach := v.guest.loopOver(node)
		unmount := v.guest.mountByHand(loop)
		return func() { unmount(); detach() }, []string{filepath.Base(loop), "by hand"}
	},
	"a loop device with an offset, over a bind mount": func(v testVolume,
		node string) (func(), []string) {
		bind := v.guest.path("bind")
		must(v.guest.t, os.WriteFile(bind, nil, 0o600))
		must(v.guest.t, unix.Mount(node, bind, "", unix.MS_BIND, ""))
		loop, detach := v.guest.loopOver(bind, "--offset", "1048576")
		must(v.guest.t, unix.Unmount(bind, unix.MNT_DETACH)) // as when a pod's namespace ends
		return detach, []string{filepath.Base(loop)}
	},
	"a loop device over one over a node of the pod's own": func(v testVolume,
		node string) (func(), []string) {
		lower, detachLower := v.guest.loopOver(v.guest.ownNode(node))
		upper, detachUpper := v.guest.loopOver(lower)
		n := opening(v.guest.t, "<>", upper)
		return func() { n.leave(); detachUpper(); detachLower() },
			[]string{filepath.Base(lower), filepath.Base(upper), n.name("sh")}
	},
	"a partition that is mounted": func(v testVolume, node string) (func(), []string) {
		part, remove := v.guest.partition(node)
		unmount := v.guest.mountByHand(part)
		return func() { unmount(); remove() }, []string{filepath.Base(part), "by hand"}
	},
	"a partition that is open for writing": func(v testVolume, node string) (func(), []string) {
		part, remove := v.guest.partition(node)
		n := opening(v.guest.t, "<>", part)
		return func() { n.leave(); remove() }, []string{n.name("sh")}
	},
	"a loop device over a partition": func(v testVolume, node string) (func(), []string) {
		part, remove := v.guest.partition(node)
		loop, detach := v.guest.loopOver(part)
		return func() { detach(); remove() }, []string{filepath.Base(loop), filepath.Base(part)}
	},
	"a process that writes beside one that only reads": func(v testVolume,
		node string) (func(), []string) {
		// As in a container, the processes open a copy of the device node, so they keep no mount busy.
		own := v.guest.ownNode(node)
		reader, writer := opening(v.guest.t, "<", own), opening(v.guest.t, "<>", own)
		v.guest.t.Cleanup(reader.leave) // a reader is harmless
		return writer.leave, []string{writer.name("sh")}
	},
	"swap": func(v testVolume, _ string) (func(), []string) {
		node := v.disk.Loop // a path that /proc/swaps does not escape
		guesttest.Run(v.guest.t, "mkswap", node)
		guesttest.Run(v.guest.t, "swapon", node)
		return func() { guesttest.Run(v.guest.t, "swapoff", node) }, []string{"as swap"}
	},
}

func (g *testGuest) loopOver(path string, args ...string) (loop string, detach func()) {
	g.t.Helper()
	loop = strings.TrimSpace(guesttest.Run(g.t, "losetup", append([]string{"--find", "--show", path},
		args...)...))
	var once sync.Once // sync.OnceFunc would panic when Run ends the test
	detach = func() { once.Do(func() { guesttest.Run(g.t, "losetup", "--detach", loop) }) }
	g.t.Cleanup(detach)
	return loop, detach
}

func (g *testGuest) mountByHand(device string) (unmount func()) {
	g.t.Helper()
	guesttest.Run(g.t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
	at := g.path("by hand")
	must(g.t, os.Mkdir(at, 0o700))
	guesttest.Run(g.t, "mount", device, at)
	return func() { _ = unix.Unmount(at, 0) }
}

func (g *testGuest) ownNode(of string) (node string) {
	g.t.Helper()
	var st unix.Stat_t
	must(g.t, unix.Stat(of, &st))
	must(g.t, unix.Mknod(g.path("node"), unix.S_IFBLK|0o600, int(st.Rdev)))
	return g.path("node")
}

func (g *testGuest) partition(node string) (part string, remove func()) {
	g.t.Helper()
	f := csitest.Got(os.Open(node))(g.t)
	defer func() { _ = f.Close() }()
	info := csitest.Got(unix.IoctlLoopGetStatus64(int(f.Fd())))(g.t)
	info.Flags |= unix.LO_FLAGS_PARTSCAN // else the kernel has no partitions of a loop device
	must(g.t, unix.IoctlLoopSetStatus64(int(f.Fd()), info))
	loop := fmt.Sprintf("/dev/loop%d", info.Number)
	guesttest.Run(g.t, "addpart", loop, "1", "2048", "8192")
	return loop + "p1", func() { guesttest.Run(g.t, "delpart", loop, "1") }
}

func TestUnpublishOrUnstageFailsWhileTheDeviceIsInUse(t *testing.T) { // NU-5
	for _, name := range short.Some(t, 3, slices.Sorted(maps.Keys(kernelUsers))) {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(16, "block")
			v.up("dev")
			end, names := kernelUsers[name](v, v.guest.path("dev"))
			err := v.unpublish("dev") // fails if the mount itself is in use
			if err == nil {
				err = v.unstageSoon()
			}
			csitest.Want(t, err, codes.Internal, csierr.StillMounted, names...)
			end()
			v.down("dev")
		})
	}
}

// Unstage succeeds for a missing device. A device that does not answer can fail in the same way.
func TestUnstageFailsWhileADeviceDoesNotAnswer(t *testing.T) { // NU-5
	serve := func(t *testing.T) (*flakydisk.Server, *flakydisk.Disk, string) {
		t.Helper()
		dir := t.TempDir()
		server := csitest.Got(flakydisk.Mount(dir))(t)
		t.Cleanup(func() { must(t, server.Close()) })
		disk := flakydisk.NewDisk(flakydisk.NewImage(64 * guesttest.MiB))
		return server, disk, server.Put("disk", disk)
	}
	t.Run("unstage fails while a loop device's backing file does not answer", func(t *testing.T) {
		v := statefulGuest(t).disk(8, "block")
		must(t, v.stage())
		server, _, file := serve(t)
		loop, detach := v.guest.loopOver(file)
		must(t, server.Close())
		v.held(filepath.Base(loop))
		detach()
		must(t, v.unstage())
	})
	t.Run("unstage fails while an unreadable disk is in use", func(t *testing.T) {
		g := statefulGuest(t)
		_, disk, file := serve(t)
		v := g.volume(g.AttachFile(guesttest.Serial, file), volume.Ext4)
		must(t, v.stage())
		must(t, unix.Unmount(v.staging(), 0)) // as if the driver died here
		user := csitest.Got(os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0))(t)
		disk.AddFault(flakydisk.Fault{On: flakydisk.OnRead})
		v.held(v.disk.Name)
		must(t, user.Close())
		disk.Heal()
		must(t, v.unstage())
	})
}

func TestUnstageReportsLostWritesTogetherWithAnotherError(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	must(t, v.stage())
	must(t, os.WriteFile(filepath.Join(v.staging(), "x"), make([]byte, 4*guesttest.MiB), 0o600))
	must(t, os.Truncate(v.disk.File, 0))
	f, err := os.Open(filepath.Join(v.staging(), "x"))
	must(t, err)
	err = v.unstage()
	must(t, f.Close())
	csitest.Want(t, err, codes.Internal, csierr.StillMounted, "could not be written out")
	_ = v.unstage() // may report the loss again
	must(t, v.unstage())
}

func TestADeviceLeftReadOnlyByADeadDriverBecomesWritable(t *testing.T) {
	for name, finish := range map[string]func(v testVolume) error{
		"by unpublish": func(v testVolume) error { return v.unpublish("dev") },
		"by unpublish, where the target's directory is gone": func(v testVolume) error {
			return v.unpublish("no/such/dev")
		},
		"by unstage": testVolume.unstage,
		"by publish": func(v testVolume) error { // NP-9
			return errors.Join(v.stage(), v.publish("dev"), writeTo(v.guest.path("dev")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(8, "block")
			must(t, v.stage())
			must(t, v.publishReadOnly("dev"))
			must(t, unix.Unmount(v.guest.path("dev"), 0)) // as if the driver died here
			v.isReadOnly(true)
			must(t, finish(v))
			v.isReadOnly(false)
		})
	}
	t.Run("a device stays read-only while another workload has it", func(t *testing.T) {
		v := statefulGuest(t).disk(8, "block")
		v.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		must(t, v.stage())
		must(t, v.publishReadOnly("dev"))
		must(t, v.publishReadOnly("other"))
		must(t, unix.Unmount(v.guest.path("dev"), 0))
		must(t, v.unpublish("dev"))
		v.isReadOnly(true)
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
		v.down("other")
		v.isReadOnly(false)
	})
}

// hostile describes a process that tries to delay the driver, in a copy of the test's mount
// namespace. If root is false, the process runs as an unprivileged user in a user namespace.
type hostile struct {
	kind string
	root bool
	act  func(kubelet string)
}

var hostiles = []hostile{
	{"lines of two megabytes", false, func(string) {
		emptyDir()
		for range 4200 {
			name := strings.Repeat("long", 63)
			try(unix.Mkdir(name, 0o700))
			try(unix.Chdir(name))
		}
		for range 500 {
			try(unix.Mount(".", ".", "", unix.MS_BIND, ""))
		}
	}},
	{"many namespaces", false, func(string) {
		manyMounts(11)
		for range 1000 {
			fork(unix.SYS_UNSHARE, unix.CLONE_NEWNS)
		}
	}},
	{"many root directories of one namespace", false, func(string) {
		manyMounts(15)
		for i := range 3000 {
			path, err := unix.BytePtrFromString(fmt.Sprint("/mnt/", i))
			try(err)
			fork(unix.SYS_CHROOT, uintptr(unsafe.Pointer(path)))
		}
	}},
	{"many processes: frozen, dead and short-lived ones", false, func(string) {
		for range 500 {
			fork(unix.SYS_PAUSE, 0)
			fork(unix.SYS_EXIT, 0)
			try(unix.Kill(fork(unix.SYS_PAUSE, 0), unix.SIGSTOP))
		}
		go func() {
			for {
				_, err := unix.Wait4(fork(unix.SYS_EXIT, 0), nil, 0, nil)
				try(err)
			}
		}()
	}},
	{"many descriptors", false, func(string) {
		for err := error(nil); err == nil; {
			_, err = unix.Dup(0)
		}
		for range 20 {
			fork(unix.SYS_PAUSE, 0)
		}
	}},
	{"a FUSE server that does not answer", true, func(kubelet string) {
		try(unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""))
		for _, path := range []string{filepath.Join(kubelet, "staging csi-own-2"), kubelet} {
			server, err := unix.Open("/dev/fuse", unix.O_RDWR, 0)
			try(err)
			try(unix.Mount("fuse", path, "fuse", 0, fmt.Sprintf(
				"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", server)))
			_, err = unix.Open(path, unix.O_PATH, 0)
			try(err)
		}
	}},
	{"many mounts of its own volume", true, func(kubelet string) {
		try(unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""))
		manyMounts(1)
		try(unix.Mount(filepath.Join(kubelet, "csi-own-0"), "2999", "", unix.MS_BIND, ""))
		double(1, 15)
	}},
	{unanswered, false, func(string) {}},
}

// unanswered is the kind of process whose mountinfo the test replaces by a FIFO without a writer.
const unanswered = "a mount table that does not answer"

func emptyDir() {
	try(unix.Mount("none", "/mnt", "tmpfs", 0, ""))
	try(unix.Chdir("/mnt"))
}

func manyMounts(power int) {
	emptyDir()
	for i := range 3000 {
		try(unix.Mkdir(fmt.Sprint(i), 0o755))
	}
	double(0, power)
}

// double bind-mounts the working directory, with all mounts in it, on its subdirectories whose
// names are the numbers from, from+1, … to-1. Each bind mount doubles the number of mounts.
func double(from, to int) {
	for i := from; i < to; i++ {
		try(unix.Mount(".", fmt.Sprint(i), "", unix.MS_BIND|unix.MS_REC, ""))
	}
}

// fork makes a process that makes one system call and then waits until it is killed. The process
// has a single thread, so it cannot run other Go code.
func fork(call, arg uintptr) (pid int) {
	r, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		try(errno)
	}
	if r != 0 {
		return int(r)
	}
	_, _, _ = unix.RawSyscall(call, arg, 0, 0)
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
	}
}

func try(err error) {
	if err != nil {
		panic(err)
	}
}

const hostileVariable = "OXIDE_TEST_HOSTILE"

// A hostile process runs this test program. It does its harm in init() and exits before any test.
func init() {
	for _, h := range hostiles {
		if h.kind == os.Getenv(hostileVariable) {
			h.act(os.Args[1])
			fmt.Println("ready")
			_, _ = os.Stdin.Read(make([]byte, 1))
			os.Exit(0)
		}
	}
}

func (h hostile) start(g *testGuest) *neighbour {
	cmd := exec.Command("/proc/self/exe", g.path(""))
	cmd.Env = append(os.Environ(), hostileVariable+"="+h.kind)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	if !h.root {
		const nobody = 65534
		ids := []syscall.SysProcIDMap{{HostID: nobody, Size: 1}}
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = ids, ids
		cmd.SysProcAttr.Credential = &syscall.Credential{}
	}
	n := begin(g.t, cmd)
	if h.kind == unanswered {
		fifo := g.path("fifo")
		must(g.t, unix.Mkfifo(fifo, 0o600))
		must(g.t, unix.Mount(fifo, fmt.Sprintf("/proc/%d/mountinfo", n.pid), "", unix.MS_BIND, ""))
		end := n.leave
		n.leave = func() {
			end()
			f := csitest.Got(os.OpenFile(fifo, os.O_RDWR, 0))(g.t) // the reader of the FIFO continues
			must(g.t, f.Close())
		}
	}
	return n
}

// usual limits the duration of a call: a call searches all namespaces twice, for up to five seconds
// each time, and waits up to five seconds for the release of a device.
const usual = 20 * time.Second

// The hostile process has copies of the mounts of some volumes. Calls for these volumes have to
// return in time, and calls for other volumes have to succeed in time.
func TestAHostileProcessDelaysNoCallForAnotherVolume(t *testing.T) {
	kinds, lives, stuck := 0, 0, 0
	for _, h := range short.Some(t, 1, hostiles) {
		kinds++
		t.Run(h.kind, func(t *testing.T) {
			g := statefulGuest(t)
			var own []testVolume
			for i, fsType := range []string{volume.Ext4, "block", volume.Btrfs} {
				v := g.volume(g.Attach(fmt.Sprint("csi-own-", i), 128*guesttest.MiB), fsType)
				v.up(v.Name)
				own = append(own, v)
			}
			n := h.start(g)
			ends := func(call func() error) error {
				t.Helper()
				late := time.AfterFunc(usual, n.leave)
				err := call()
				if !late.Stop() {
					stuck++
					t.Errorf("the call takes more than %s", usual)
				}
				return err
			}
			all := []string{volume.Ext4, "block", volume.XFS, volume.Btrfs}
			for i, fsType := range all[kinds%2*2:][:2] {
				lives++
				v := g.volume(g.Attach(fmt.Sprint("csi-other-", i), 512*guesttest.MiB), fsType)
				must(t, ends(v.stage))
				must(t, ends(func() error { return v.publish(v.Name) }))
				if fsType != "block" {
					must(t, os.WriteFile(filepath.Join(g.path(v.Name), "file"), []byte("x"), 0o600))
				}
				must(t, ends(func() error { return v.unpublish(v.Name) }))
				must(t, ends(v.unstage))
			}
			for _, v := range own {
				unpublish := func() error { return v.unpublishSoon(v.Name) }
				for _, call := range []func() error{unpublish, v.unstageSoon} {
					if err := ends(call); err != nil && (!csierr.Has(err, csierr.StillMounted) ||
						!strings.Contains(err.Error(), "process ") || len(err.Error()) > 16<<10) {
						t.Errorf("its own volume: %.500s", err)
					}
				}
			}
			n.leave()
			for _, v := range own {
				v.down(v.Name)
			}
		})
	}
	fmt.Printf("FIGURE hostile-neighbours kinds=%d lives=%d stuck=%d\n", kinds, lives, stuck)
}
