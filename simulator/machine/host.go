//go:build linux

package machine

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Host starts the machines of a rack.
type Host struct {
	// image is a directory from tools/vm-image with a kernel, a root filesystem and a private key.
	image string
	// accelerator is "kvm" or "tcg".
	accelerator string
	// Type is QEMU's machine type: "pc" (i440FX, the default), or "q35" with PCIe root ports.
	Type string
	// EndsWithProcess ends the machines with this process. Otherwise a later process can find them.
	EndsWithProcess bool
}

const (
	qemu  = "qemu-system-x86_64"
	disks = "qemu-img"
)

// Open returns a Host if QEMU is installed and dir has an image that tools/vm-image made.
func Open(ctx context.Context, dir string) (*Host, error) {
	for _, program := range []string{qemu, disks} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("virtual machines need %s: %w; install qemu-system-x86 and "+
				"qemu-utils", program, err)
		}
	}
	name, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		return nil, fmt.Errorf("virtual machines need an image in %s: %w; make one with make vm-image",
			dir, err)
	}
	in := filepath.Join(dir, strings.TrimSpace(string(name)))
	h := &Host{image: in, accelerator: "tcg"}
	if kvmWorks(ctx) {
		h.accelerator = "kvm"
	}
	return h, nil
}

// Key returns the path of the private key with which root can log in to each machine.
func (h *Host) Key() string { return filepath.Join(h.image, "key") }

const bootTime = 5 * time.Second

// kvmWorks reports whether KVM runs a program of four bytes: /dev/kvm may exist although KVM fails.
func kvmWorks(ctx context.Context) bool {
	if unix.Access("/dev/kvm", unix.R_OK|unix.W_OK) != nil {
		return false
	}
	const exit = 0x10
	sector := make([]byte, 512)
	copy(sector, []byte{0xb0, exit, 0xe6, 0xf4}) // mov al, exit; out 0xf4, al
	copy(sector[510:], []byte{0x55, 0xaa})
	f, err := os.CreateTemp("", "oxide-kvm-")
	if err != nil {
		return false
	}
	defer os.Remove(f.Name())
	if _, err := f.Write(sector); err != nil || f.Close() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	err = exec.CommandContext(ctx, qemu, "-machine", "pc,accel=kvm", "-cpu", "host", "-m", "16",
		"-nodefaults", "-display", "none", "-device", "isa-debug-exit,iobase=0xf4",
		"-drive", "format=raw,readonly=on,file="+f.Name()).Run()
	var ended *exec.ExitError
	return errors.As(err, &ended) && ended.ExitCode() == exit<<1|1
}

// Start starts a machine in dir, and returns when the machine has its disks and runs.
func (h *Host) Start(ctx context.Context, dir string, g Guest, d []Disk) (_ *Machine, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start the machine of instance %s: %w", g.Name, err)
		}
	}()
	if len(d) > len(slots) {
		return nil, errNoSlot
	}
	var lock *os.File
	// An earlier QEMU may hold the lock for a short time after it seemed to have ended.
	if err := retry(ctx, func() (again bool, err error) {
		lock, err = hold(dir)
		return errors.Is(err, unix.EWOULDBLOCK), err
	}); err != nil {
		return nil, err
	}
	defer lock.Close()
	image, err := h.root(ctx, dir)
	if err != nil {
		return nil, err
	}
	if err := h.writeKeys(dir, g.Keys); err != nil {
		return nil, err
	}
	c := exec.Command(qemu, h.arguments(g, image)...)
	c.ExtraFiles = []*os.File{lock}
	exited, err := h.launch(c, dir)
	if err != nil {
		return nil, err
	}
	m, err := await(ctx, dir, g.ID, exited)
	if err == nil {
		for _, disk := range d {
			err = errors.Join(err, m.Plug(ctx, disk))
		}
		if err == nil {
			err = m.qmp.do(ctx, "cont", nil, nil)
		}
	}
	if err != nil {
		_ = c.Process.Kill()
		<-exited // QEMU writes to no disk any more
		if m != nil {
			_ = m.Release() // the QEMU process has ended
		}
		said, _ := os.ReadFile(filepath.Join(dir, "qemu.log"))
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(said[max(0, len(said)-1024):]))
	}
	return m, nil
}

// launch starts QEMU in a machine's directory. When QEMU ends, the channel gets the error of Wait.
func (h *Host) launch(c *exec.Cmd, dir string) (<-chan error, error) {
	log, err := os.Create(filepath.Join(dir, "qemu.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// The path of a socket must be short, so QEMU runs in dir. Setsid lets QEMU outlive this process.
	c.Dir, c.Stderr, c.SysProcAttr = dir, log, &syscall.SysProcAttr{Setsid: true}
	if err := os.RemoveAll(filepath.Join(dir, "qmp.sock")); err != nil {
		return nil, err
	}
	if h.EndsWithProcess {
		c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	started, exited := make(chan error, 1), make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the thread that started QEMU ends, so keep this thread.
		runtime.LockOSThread()
		err := c.Start()
		started <- err
		if err == nil {
			exited <- c.Wait()
			close(exited) // a later receive must not block
		}
	}()
	return exited, <-started
}

// hold locks the directory of a machine. QEMU inherits the lock and keeps it until its own end.
func hold(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("a QEMU of an earlier start has %s open: %w; end it",
			lock.Name(), err), lock.Close())
	}
	return lock, nil
}

func retry(ctx context.Context, do func() (again bool, err error)) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		again, err := do()
		if !again {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-ticker.C:
		}
	}
}

// root creates the root disk of a machine if it is missing, and returns the image on which the disk
// is based. The kernel must be from this image, because the kernel's modules are on the disk.
func (h *Host) root(ctx context.Context, dir string) (string, error) {
	link, root := filepath.Join(dir, "image"), filepath.Join(dir, "root.qcow2")
	if _, err := os.Lstat(root); err == nil {
		image, err := os.Readlink(link)
		if err != nil {
			return "", err
		}
		if _, err := os.Stat(filepath.Join(image, "root.img")); err != nil {
			return "", fmt.Errorf("the image of its root disk is gone: %w; delete the instance, or "+
				"remove %s and lose what the guest has there", err, root)
		}
		return image, nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err := os.Symlink(h.image, link); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, disks, "create", "-q", "-f", "qcow2", "-F", "raw", "-b",
		filepath.Join(h.image, "root.img"), root+".new").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("make the root disk: %w: %s", err, out)
	}
	return h.image, os.Rename(root+".new", root)
}

func (h *Host) writeKeys(dir string, keys []string) error {
	own, err := os.ReadFile(h.Key() + ".pub")
	if err != nil {
		return err
	}
	text := string(own) + strings.Join(keys, "\n") + "\n"
	return os.WriteFile(filepath.Join(dir, "keys"), []byte(text), 0o600)
}

// arguments returns QEMU's arguments for a machine that does not run before the command "cont".
func (h *Host) arguments(g Guest, image string) []string {
	// QEMU's NVMe controller ignores a guest's demand for a durable write (FUA), and QEMU writes the
	// block table of a qcow2 only at a flush. With writethrough the guest's journal survives a kill.
	const own = "file=root.qcow2,format=qcow2,if=none,id=root,cache=writethrough"
	// Set maxcpus to 2 or more: with 1, QEMU 7.2 without KVM drops memory barriers, and NVMe may hang.
	cpu, cpus := "max", fmt.Sprintf("cpus=%d,maxcpus=%d", g.CPUs, g.CPUs+1)
	if h.accelerator == "kvm" {
		cpu, cpus = "host", strconv.Itoa(g.CPUs)
	}
	board := cmp.Or(h.Type, "pc") + ",accel=" + h.accelerator
	arguments := []string{"-machine", board, "-cpu", cpu, "-S",
		"-smp", cpus, "-m", strconv.FormatInt(g.MemoryBytes>>20, 10),
		"-nodefaults", "-no-user-config", "-display", "none", "-rtc", "base=utc",
		"-smbios", "type=1,manufacturer=Oxide,product=OxVM,serial=" + g.ID + ",uuid=" + g.ID,
		"-kernel", filepath.Join(image, "vmlinuz"), "-append", "root=PARTUUID=4f584944-01 rootwait " +
			"rw quiet panic=1 console=ttyS0 oxide.name=" + g.Name,
		"-fw_cfg", "name=opt/oxide/keys,file=keys",
		"-drive", own, "-device", fmt.Sprintf("nvme,drive=root,serial=root,addr=%#x", rootSlot),
		"-netdev", "user,id=net,hostfwd=tcp:127.0.0.1:0-:22",
		"-device", "virtio-net-pci,netdev=net,addr=0x8",
		"-chardev", "file,id=console,path=console.log", "-serial", "chardev:console",
		"-qmp", "unix:qmp.sock,server=on,wait=off"}
	if h.Type == "q35" {
		for _, slot := range slots {
			arguments = append(arguments, "-device",
				fmt.Sprintf("pcie-root-port,id=%s,chassis=%d,addr=%#x", port(slot), slot, slot))
		}
	}
	return arguments
}

// await waits until the new QEMU process answers with the instance's ID.
func await(ctx context.Context, dir, id string, exited <-chan error) (m *Machine, err error) {
	ctx, cancel := context.WithTimeout(ctx, plugTime)
	defer cancel()
	err = retry(ctx, func() (again bool, err error) {
		if m, err = find(ctx, dir, id); m != nil {
			return false, nil
		}
		select {
		case end := <-exited:
			return false, fmt.Errorf("QEMU has ended: %w", errors.Join(end, ErrGone))
		default:
			return true, err
		}
	})
	if m == nil && ctx.Err() != nil {
		err = fmt.Errorf("QEMU does not answer: %w", err)
	}
	return m, err
}

// Find returns the machine that runs in the directory: the process that answers at the socket with
// the instance's ID. It returns nil if there is none, and waits for a QEMU that is still starting.
func Find(ctx context.Context, dir, id string) (m *Machine, err error) {
	ctx, cancel := context.WithTimeout(ctx, plugTime)
	defer cancel()
	err = retry(ctx, func() (again bool, err error) {
		if m, err = find(ctx, dir, id); m != nil || err != nil {
			return false, err
		}
		lock, err := hold(dir)
		if err != nil {
			return true, err
		}
		return false, lock.Close()
	})
	return m, err
}

func find(ctx context.Context, dir, id string) (*Machine, error) {
	at, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	// The path of a socket must be short, so this path goes through the open directory.
	conn, err := new(net.Dialer).DialContext(ctx, "unix",
		fmt.Sprintf("/proc/self/fd/%d/qmp.sock", at.Fd()))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	pid, err := peer(conn.(*net.UnixConn))
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	m := &Machine{ID: id, pid: pid}
	// QEMU's greeting proves that pid does not refer to a later process with the PID of QEMU.
	if m.qmp, err = connect(ctx, conn); err != nil {
		return nil, errors.Join(err, unix.Close(pid))
	}
	var is struct{ UUID string }
	if err = m.qmp.do(ctx, "query-uuid", nil, &is); err == nil && is.UUID != id {
		err = fmt.Errorf("the machine in %s is that of instance %s, not of %s", dir, is.UUID, id)
	}
	if err == nil {
		err = m.findPort(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, m.qmp.conn.Close(), unix.Close(pid))
	}
	go m.shorten(dir)
	return m, nil
}

// peer returns a pidfd of the process that listens at the other end of a connection.
func peer(conn *net.UnixConn) (pidfd int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var of *unix.Ucred
	err = errors.Join(raw.Control(func(fd uintptr) {
		of, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}), err)
	if err != nil {
		return 0, err
	}
	return unix.PidfdOpen(int(of.Pid), 0)
}

// keptText is the number of bytes at the end of the console text that are always kept.
const keptText = 1 << 20

func (m *Machine) shorten(dir string) {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	for {
		select {
		case <-every.C:
			_ = forgetText(dir) // after an error, try again a second later
		case <-m.qmp.ended:
			return
		}
	}
}

// forgetText frees the space of the console text before its last keptText bytes. No offset changes.
func forgetText(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "console.log"), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil || size <= keptText {
		return err
	}
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0,
		(size-keptText)&^0xfff)
}

// Console reads at most "most" bytes of the serial console's text since the last start, from the
// offset "from" on. It skips text that is no longer kept. The offset -1 is the end of the text, and
// -2 its last byte. end is the offset behind the last byte read.
func Console(dir string, from, most int64) (text []byte, end int64, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "console.log"), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, 0, err
	}
	if from < 0 {
		from = max(0, size+1+from)
	}
	kept := func(at int64) (int64, error) {
		first, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // there is no text behind the offset
			return max(at, size), nil
		}
		return first, err
	}
	if from, err = kept(min(from, size)); err != nil {
		return nil, 0, err
	}
	text = make([]byte, max(0, min(size-from, most)))
	n, err := f.ReadAt(text, from)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, 0, err
	}
	first, err := kept(from) // skip NULs: forgetText may have run during the read
	if err != nil {
		return nil, 0, err
	}
	return text[min(first-from, int64(n)):n], from + int64(n), nil
}
