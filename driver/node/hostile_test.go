//go:build linux

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// hostile is a kind of process beside the driver. It has a copy of the test's mount namespace, and
// processes that end with it. Unless it is root it is an ordinary user, with a user namespace.
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
	{"processes that are many, frozen, dead and brief", false, func(string) {
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

// unanswered is the kind whose mount table the test covers with a FIFO.
const unanswered = "a mount table that does not answer"

func emptyDir() {
	try(unix.Mount("none", "/mnt", "tmpfs", 0, ""))
	try(unix.Chdir("/mnt"))
}

// manyMounts makes two to that power of mounts.
func manyMounts(power int) {
	emptyDir()
	for i := range 3000 {
		try(unix.Mkdir(fmt.Sprint(i), 0o755))
	}
	double(0, power)
}

// double mounts what there is once more on a directory, and on the next ones.
func double(from, to int) {
	for i := from; i < to; i++ {
		try(unix.Mount(".", fmt.Sprint(i), "", unix.MS_BIND|unix.MS_REC, ""))
	}
}

// fork makes a process that makes one system call and then waits to be killed. It has one thread,
// with which Go's runtime does not work.
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

// A hostile process is this program, too.
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
			f, err := os.OpenFile(fifo, os.O_RDWR, 0) // who waits for it goes on
			must(g.t, err)
			must(g.t, f.Close())
		}
	}
	return n
}

// usual is how long a call may take: it searches all namespaces twice, for five seconds each, and
// waits for five seconds until a device is released.
const usual = 20 * time.Second

// Other volumes live while a process that has copies of some makes what the driver reads long,
// many, odd and slow. Its own volumes get an answer, too.
func TestAHostileNeighbourStopsNoCallOfAnotherVolume(t *testing.T) {
	kinds, lives, stuck := 0, 0, 0
	for _, h := range short.Some(t, 1, hostiles) {
		kinds++
		t.Run(h.kind, func(t *testing.T) {
			g := statefulGuest(t)
			var own []testVolume
			for i, fsType := range []string{volume.Ext4, "block", volume.Btrfs} {
				v := g.volume(g.Attach(fmt.Sprint("csi-own-", i), 128*guesttest.MiB), fsType)
				must(t, v.stage())
				must(t, v.publish(v.Name))
				own = append(own, v)
			}
			n := h.start(g)
			ends := func(call func() error) error {
				t.Helper()
				late := time.AfterFunc(usual, n.leave)
				err := call()
				if !late.Stop() {
					stuck++
					t.Errorf("it takes more than %s", usual)
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
				must(t, v.unpublish(v.Name))
				must(t, v.unstage())
			}
		})
	}
	fmt.Printf("FIGURE hostile-neighbours kinds=%d lives=%d stuck=%d\n", kinds, lives, stuck)
}
