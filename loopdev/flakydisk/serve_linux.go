package flakydisk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Server serves disks as files of a directory.
type Server struct {
	dir   string
	root  *root
	guard *guard
}

// Mount mounts a filesystem without disks at a directory.
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

// refusePolls lets the kernel learn that these files cannot be polled. Go polls each file that it
// opens, without telling its scheduler, so that the thread that had to answer might not run.
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

// maxBytes is the size of a request; a larger one of a loop device comes in parts. Each reader of
// the connection has a buffer of that size.
const maxBytes = 128 << 10

// mountFUSE mounts a filesystem and returns its connection. No program that this process starts
// inherits it: while anybody has it open, the kernel waits for the filesystem's answers, even if
// nobody is left to give them.
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

// Put adds a disk, in the place of any of that name, and returns its path.
func (s *Server) Put(name string, d *Disk) (path string) {
	s.root.mu.Lock()
	defer s.root.mu.Unlock()
	s.root.last++
	s.root.disks[name] = &file{disk: d, number: s.root.last}
	return filepath.Join(s.dir, name)
}

// Remove removes a disk. A device that has it open keeps it.
func (s *Server) Remove(name string) {
	s.root.mu.Lock()
	delete(s.root.disks, name)
	s.root.mu.Unlock()
	// The kernel may know the file for as long as it likes, and until then the disk is kept, too.
	_ = s.root.NotifyEntry(name)
}

// Close unmounts the filesystem. The devices of its disks fail from then on.
func (s *Server) Close() error {
	defer s.guard.close()
	err := unix.Unmount(s.dir, unix.MNT_DETACH|unix.MNT_FORCE)
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount the disks at %s: %w", s.dir, err)
	}
	return nil
}

// root is the directory.
type root struct {
	fs.Inode

	// mu guards the rest.
	mu    sync.Mutex
	disks map[string]*file
	last  uint64 // the inode number that was used last
}

var (
	_ fs.NodeLookuper  = (*root)(nil)
	_ fs.NodeReaddirer = (*root)(nil)
)

// Lookup finds a disk.
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

// Readdir lists the disks.
func (r *root) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var entries []fuse.DirEntry
	for name, f := range r.disks {
		entries = append(entries, fuse.DirEntry{Name: name, Mode: syscall.S_IFREG, Ino: f.number + 1})
	}
	return fs.NewListDirStream(entries), 0
}

// file is a disk as a file. The directory's inode has number 1.
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

// Open opens the file. The kernel caches nothing of it: every read and write of the device comes.
func (f *file) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

// Getattr tells the disk's size.
func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	f.fill(&out.Attr)
	return 0
}

// Setattr changes the disk's size; nothing else can be changed.
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

// Read reads from the disk.
func (f *file) Read(_ context.Context, _ fs.FileHandle, b []byte, offset int64) (fuse.ReadResult,
	syscall.Errno) {
	n, err := f.disk.ReadAt(b, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, errno(err)
	}
	return fuse.ReadResultData(b[:n]), 0
}

// Write writes to the disk.
func (f *file) Write(_ context.Context, _ fs.FileHandle, b []byte, offset int64) (uint32,
	syscall.Errno) {
	n, err := f.disk.WriteAt(b, offset)
	if err != nil {
		return 0, errno(err)
	}
	return uint32(n), 0
}

// Fsync is a flush of the device.
func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return errno(f.disk.Flush())
}

// Allocate is a discard of the device, or a write of zeroes.
func (f *file) Allocate(_ context.Context, _ fs.FileHandle, offset, n uint64,
	mode uint32) syscall.Errno {
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) == 0 {
		return syscall.EOPNOTSUPP
	}
	return errno(f.disk.Zero(int64(offset), int64(n)))
}

// punch makes a hole in a file.
func punch(f *os.File, offset, n int64) error {
	const hole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	return unix.Fallocate(int(f.Fd()), hole, offset, n)
}

// errno is an error as the kernel knows it.
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
