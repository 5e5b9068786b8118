package flakydisk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Server serves disks as files in a directory.
type Server struct {
	dir   string
	root  *root
	guard *guard
}

// Mount mounts an empty FUSE filesystem at a directory. Put adds disks to it.
func Mount(dir string) (*Server, error) {
	s := &Server{dir: dir, root: &root{disks: map[string]*file{}}}
	var err error
	if s.guard, err = newGuard(dir); err != nil {
		return nil, err
	}
	connection, err := mountFUSE(dir)
	if err != nil {
		s.guard.close()
		return nil, fmt.Errorf("mount a FUSE filesystem at %s (it takes /dev/fuse and "+
			"CAP_SYS_ADMIN): %w", dir, err)
	}
	_, err = fs.Mount(fmt.Sprint("/dev/fd/", connection), s.root,
		&fs.Options{MountOptions: fuse.MountOptions{MaxWrite: maxBytes, DisableXAttrs: true,
			Logger: log.New(io.Discard, "", 0)}})
	if err == nil {
		err = s.refusePolls()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serve a FUSE filesystem at %s: %w", dir, err), s.Close())
	}
	return s, nil
}

// refusePolls polls a file, so that the kernel learns that the server's files cannot be polled.
// Otherwise the kernel asks the server whenever Go opens one of the files, and Go's scheduler may
// not run the thread that answers.
func (s *Server) refusePolls() error {
	const name = "poll"
	defer s.Remove(name)
	fd, err := unix.Open(s.Put(name, NewDisk(NewImage(0))), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return errors.Join(err, unix.Close(fd))
}

// maxBytes is the maximum size of a request to the server. The kernel splits larger requests. Each
// goroutine that reads requests has a buffer of this size.
const maxBytes = 128 << 10

// mountFUSE mounts a filesystem and returns its connection to the kernel. Programs that this
// process starts must not inherit the connection: while any process has it open, the kernel waits
// for answers, even if the server has ended.
func mountFUSE(dir string) (connection int, err error) {
	connection, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open /dev/fuse: %w", err)
	}
	err = unix.Mount("flakydisk", dir, "fuse.flakydisk", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf(
		"fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%d", connection, maxBytes))
	if err != nil {
		return 0, errors.Join(err, unix.Close(connection))
	}
	return connection, nil
}

// Put adds a disk, or replaces the disk of the same name. It returns the path of the disk's file.
func (s *Server) Put(name string, d *Disk) (path string) {
	s.root.mu.Lock()
	defer s.root.mu.Unlock()
	s.root.last++
	s.root.disks[name] = &file{disk: d, number: s.root.last}
	return filepath.Join(s.dir, name)
}

// Remove removes a disk's file. A loop device that is attached to the file can still use the disk.
func (s *Server) Remove(name string) {
	s.root.mu.Lock()
	delete(s.root.disks, name)
	s.root.mu.Unlock()
	// Make the kernel drop the file from its cache, where the file might stay for ever. The server
	// frees the disk only after that.
	_ = s.root.NotifyEntry(name)
}

// Close unmounts the filesystem. From then on, operations of the disks' loop devices fail.
func (s *Server) Close() error {
	defer s.guard.close()
	err := unix.Unmount(s.dir, unix.MNT_DETACH|unix.MNT_FORCE)
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount the disks at %s: %w", s.dir, err)
	}
	return nil
}

type root struct {
	fs.Inode

	mu    sync.Mutex // guards the fields below
	disks map[string]*file
	last  uint64 // the inode number that was used last
}

var _ fs.NodeLookuper = (*root)(nil)

func (r *root) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode,
	syscall.Errno) {
	r.mu.Lock()
	f := r.disks[name]
	r.mu.Unlock()
	if f == nil {
		return nil, syscall.ENOENT
	}
	f.fill(&out.Attr)
	return r.NewInode(ctx, &file{disk: f.disk, number: f.number},
		fs.StableAttr{Mode: syscall.S_IFREG, Ino: f.number + 1}), 0
}

// file serves a disk as a file. Its inode number is number+1, because the directory has inode 1.
type file struct {
	fs.Inode
	disk   *Disk
	number uint64
}

var (
	_ fs.NodeOpener    = (*file)(nil)
	_ fs.NodeGetattrer = (*file)(nil)
	_ fs.NodeSetattrer = (*file)(nil)
	_ fs.NodeReader    = (*file)(nil)
	_ fs.NodeWriter    = (*file)(nil)
	_ fs.NodeFsyncer   = (*file)(nil)
	_ fs.NodeAllocater = (*file)(nil)
)

func (f *file) fill(out *fuse.Attr) {
	out.Mode, out.Size = syscall.S_IFREG|0o600, uint64(f.disk.Size())
}

// Open tells the kernel not to cache the file, so that every read and write reaches the server.
func (f *file) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	f.fill(&out.Attr)
	return 0
}

// Setattr changes the disk's size. Other attributes cannot be changed.
func (f *file) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn,
	out *fuse.AttrOut) syscall.Errno {
	if size, ok := in.GetSize(); ok {
		if err := f.disk.Resize(int64(size)); err != nil {
			return errno(err)
		}
	}
	f.fill(&out.Attr)
	return 0
}

func (f *file) Read(_ context.Context, _ fs.FileHandle, b []byte, offset int64) (fuse.ReadResult,
	syscall.Errno) {
	n, err := f.disk.ReadAt(b, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, errno(err)
	}
	return fuse.ReadResultData(b[:n]), 0
}

func (f *file) Write(_ context.Context, _ fs.FileHandle, b []byte, offset int64) (uint32,
	syscall.Errno) {
	n, err := f.disk.WriteAt(b, offset)
	if err != nil {
		return 0, errno(err)
	}
	return uint32(n), 0
}

// Fsync flushes the disk. The kernel calls it when a program flushes the loop device.
func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return errno(f.disk.Flush())
}

// Allocate zeroes a range. The kernel calls it when the loop device discards or zeroes the range.
func (f *file) Allocate(_ context.Context, _ fs.FileHandle, offset, n uint64,
	mode uint32) syscall.Errno {
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) == 0 {
		return syscall.EOPNOTSUPP
	}
	return errno(f.disk.Zero(int64(offset), int64(n)))
}

func punch(f *os.File, offset, n int64) error {
	const hole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	return unix.Fallocate(int(f.Fd()), hole, offset, n)
}

func errno(err error) syscall.Errno {
	var known syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &known):
		return known
	}
	return syscall.EIO
}

// guard is a child process, which waits until this process ends and then unmounts the filesystem by
// force. Processes that wait for the filesystem then get an error.
//
// The kernel does the same when the filesystem's connection has no user any more. But a killed
// process keeps its files open while one of its threads waits for a disk, and no signal ends this
// wait. If the process itself serves that disk, the thread waits for ever.
type guard struct {
	process *exec.Cmd
	ended   chan struct{}
}

// guardScript unmounts the directory $0 after SIGTERM or at the end of its stdin. It prints a line
// when it is ready.
const guardScript = `end() { trap "" TERM; exec umount -l -f -- "$0"; }
trap end TERM
echo
read -r nothing
end`

func newGuard(dir string) (*guard, error) {
	g := &guard{exec.Command("/bin/sh", "-c", guardScript, dir), make(chan struct{})}
	// In a process group of its own, the guard gets no signals from a terminal. When the thread that
	// started the guard ends, the kernel sends SIGTERM to the guard.
	g.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	_, err := g.process.StdinPipe()
	out, outErr := g.process.StdoutPipe()
	if err := errors.Join(err, outErr); err != nil {
		return nil, err
	}
	started := make(chan error)
	go func() {
		// The guard unmounts when the thread that started it ends, so this thread must outlive the guard.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(g.ended)
		err := g.process.Start()
		if err == nil {
			_, err = out.Read(make([]byte, 1))
		}
		started <- err
		if g.process.Process != nil {
			_ = g.process.Wait()
		}
	}()
	if err := <-started; err != nil {
		g.close()
		return nil, fmt.Errorf("start a guard of the disks: %w", err)
	}
	return g, nil
}

// close ends the guard without unmounting anything.
func (g *guard) close() {
	if g.process.Process != nil {
		_ = g.process.Process.Kill()
	}
	<-g.ended
}
