//go:build linux

package trace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// call is a system call that a thread is about to make.
type call struct {
	*tracing
	syscallInfo
	tid int
}

// rule contains a system call's name in Effect.Call, and a function that returns false for a call
// without an effect.
type rule struct {
	name   string
	effect func(c call) (e Effect, ok bool)
}

// rules contains the system calls that can have effects. A change that ends with the process, such
// as one of descriptors, locks, memory or detached mounts, is no effect.
var rules = map[uint64]rule{
	unix.SYS_WRITE:           {"write", writes},
	unix.SYS_WRITEV:          {"write", writes},
	unix.SYS_SENDTO:          {"write", writes},
	unix.SYS_PWRITE64:        {"pwrite", writes},
	unix.SYS_PWRITEV:         {"pwrite", writes},
	unix.SYS_PWRITEV2:        {"pwrite", writes},
	unix.SYS_COPY_FILE_RANGE: {"copy_file_range", file(2)},
	unix.SYS_SENDFILE:        {"sendfile", file(0)},
	unix.SYS_FSYNC:           {"fsync", file(0)},
	unix.SYS_FDATASYNC:       {"fsync", file(0)},
	unix.SYS_SYNC_FILE_RANGE: {"fsync", file(0)},
	unix.SYS_SYNCFS:          {"syncfs", file(0)},
	unix.SYS_MSYNC:           {"msync", always("memory")},
	unix.SYS_FTRUNCATE:       {"ftruncate", file(0)},
	unix.SYS_TRUNCATE:        {"ftruncate", path(0)},
	unix.SYS_FALLOCATE:       {"fallocate", file(0)},
	unix.SYS_FCHMOD:          {"fchmodat", file(0)},
	unix.SYS_FCHMODAT:        {"fchmodat", pathAt(0)},
	unix.SYS_OPENAT:          {"openat", pathAt(unix.O_CREAT)},
	unix.SYS_OPENAT2:         {"openat", opensHow},
	unix.SYS_MKDIRAT:         {"mkdirat", pathAt(0)},
	unix.SYS_UNLINKAT:        {"unlinkat", pathAt(0)},
	unix.SYS_RENAMEAT:        {"renameat", path(3)},
	unix.SYS_RENAMEAT2:       {"renameat", path(3)},
	unix.SYS_LINKAT:          {"linkat", path(3)},
	unix.SYS_SYMLINKAT:       {"symlinkat", path(2)},
	unix.SYS_MKNODAT:         {"mknodat", pathAt(0)},
	unix.SYS_EXECVE:          {"execve", program},
	unix.SYS_MOUNT:           {"mount", path(1)},
	unix.SYS_UMOUNT2:         {"umount2", path(0)},
	unix.SYS_FSCONFIG:        {"fsconfig", configures},
	unix.SYS_MOVE_MOUNT:      {"move_mount", path(3)},
	unix.SYS_OPEN_TREE:       {"open_tree", pathAt(unix.OPEN_TREE_CLONE)},
	unix.SYS_MOUNT_SETATTR:   {"mount_setattr", always("mount")},
	unix.SYS_IOCTL:           {"ioctl", changes},
}

// ioctls contains the ioctls that change a device or a filesystem.
var ioctls = map[uint64]string{
	unix.BLKROSET: "BLKROSET", unix.BLKFLSBUF: "BLKFLSBUF", unix.BLKRRPART: "BLKRRPART",
	0x1277: "BLKDISCARD", 0x127d: "BLKSECDISCARD", 0x127f: "BLKZEROOUT",
	0x4010586e: "XFS_IOC_FSGROWFSDATA", 0x40086610: "EXT4_IOC_RESIZE_FS",
	0x50009403: "BTRFS_IOC_RESIZE", 0x50009404: "BTRFS_IOC_SCAN_DEV",
	0x50009405: "BTRFS_IOC_FORGET_DEV",
	0xc0045877: "FIFREEZE", 0xc0045878: "FITHAW", 0xc0185879: "FITRIM",
	unix.FICLONE: "FICLONE", unix.FICLONERANGE: "FICLONERANGE",
	unix.LOOP_SET_FD: "LOOP_SET_FD", unix.LOOP_CLR_FD: "LOOP_CLR_FD",
	unix.LOOP_SET_STATUS64: "LOOP_SET_STATUS64", 0x4c06: "LOOP_CHANGE_FD",
	unix.LOOP_SET_CAPACITY: "LOOP_SET_CAPACITY", unix.LOOP_CONFIGURE: "LOOP_CONFIGURE",
	unix.LOOP_CTL_ADD: "LOOP_CTL_ADD", unix.LOOP_CTL_REMOVE: "LOOP_CTL_REMOVE",
	unix.LOOP_CTL_GET_FREE: "LOOP_CTL_GET_FREE",
}

func always(target string) func(call) (Effect, bool) {
	return func(call) (Effect, bool) { return Effect{Target: target}, true }
}

// file returns a function for system calls that change the file whose descriptor is argument arg.
func file(arg int) func(call) (Effect, bool) {
	return func(c call) (Effect, bool) {
		target, ok := c.fileTarget(int(int32(c.arg(arg))))
		return Effect{Target: target}, ok
	}
}

// path returns a function for system calls that change the path in argument arg.
func path(arg int) func(call) (Effect, bool) {
	return func(c call) (Effect, bool) { return c.onPath(unix.AT_FDCWD, c.arg(arg)) }
}

// pathAt returns a function for system calls that change the path in argument 1, below the
// directory in argument 0. If flag is not 0, a call without the flag in argument 2 has no effect.
func pathAt(flag uint64) func(call) (Effect, bool) {
	return func(c call) (Effect, bool) {
		if flag != 0 && c.flags(2)&flag == 0 {
			return Effect{}, false
		}
		return c.onPath(c.descriptor(), c.arg(1))
	}
}

func (c call) onPath(directory int, address uint64) (Effect, bool) {
	name := text(c.tid, address)
	if !filepath.IsAbs(name) {
		in := fmt.Sprintf("/proc/%d/cwd", c.tid)
		if directory != unix.AT_FDCWD {
			in = fmt.Sprintf("/proc/%d/fd/%d", c.tid, directory)
		}
		dir, err := os.Readlink(in)
		switch {
		case err == nil && dir == "/" && directory != unix.AT_FDCWD:
			return Effect{}, false // a detached mount, which ends with the process
		case err == nil:
			name = filepath.Join(dir, name)
		}
	}
	return Effect{Target: c.normalize(name)}, !kernelFile(name)
}

func kernelFile(name string) bool {
	return name == "/dev/null" || strings.HasPrefix(name, "/proc/") ||
		strings.HasPrefix(name, "/sys/") || strings.HasPrefix(name, "/memfd:")
}

// opens returns a function for open calls, which have an effect only if they can create the file.
func opens(name, flags int) func(call) (Effect, bool) {
	return func(c call) (Effect, bool) {
		if c.flags(flags)&unix.O_CREAT == 0 {
			return Effect{}, false
		}
		return c.onPath(unix.AT_FDCWD, c.arg(name))
	}
}

func opensHow(c call) (Effect, bool) {
	how := memory(c.tid, c.arg(2), 8)
	if len(how) < 8 || binary.NativeEndian.Uint64(how)&unix.O_CREAT == 0 {
		return Effect{}, false
	}
	return c.onPath(c.descriptor(), c.arg(1))
}

func program(c call) (Effect, bool) {
	return Effect{Target: filepath.Base(text(c.tid, c.arg(0)))}, true
}

// configures returns false for the commands of fsconfig that only collect options.
func configures(c call) (Effect, bool) {
	switch c.flags(1) {
	case unix.FSCONFIG_CMD_CREATE, 8: // FSCONFIG_CMD_CREATE_EXCL
		return Effect{Target: "create"}, true
	case unix.FSCONFIG_CMD_RECONFIGURE:
		return Effect{Target: "reconfigure"}, true
	}
	return Effect{}, false
}

func changes(c call) (Effect, bool) {
	name, ok := ioctls[c.flags(1)]
	return Effect{Call: name, Target: "device"}, ok
}

func writes(c call) (Effect, bool) {
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", c.tid, c.descriptor()))
	if err != nil {
		return Effect{}, false
	}
	if strings.HasPrefix(link, "socket:") {
		return c.message(link)
	}
	target, ok := c.fileTarget(c.descriptor())
	return Effect{Target: target}, ok
}

// message returns a write's effect: a request to the rack, the rack's answer, or an RPC's answer.
func (c call) message(link string) (Effect, bool) {
	address, n := c.arg(1), int(min(c.arg(2), 1<<16))
	if c.number() == unix.SYS_WRITEV {
		vector := memory(c.tid, c.arg(1), 16)
		if len(vector) < 16 {
			return Effect{}, false
		}
		address = binary.NativeEndian.Uint64(vector)
		n = int(min(binary.NativeEndian.Uint64(vector[8:]), 1<<16))
	}
	if n == 0 {
		return Effect{}, false
	}
	data := memory(c.tid, address, n)
	switch c.socket(link) {
	case rackClient:
		method, rest, ok := bytes.Cut(data, []byte(" /"))
		if !ok || len(method) > 7 {
			return Effect{}, false // a later part of a request
		}
		where, _, _ := strings.Cut(string(rest[:min(len(rest), 200)]), " ")
		where, _, _ = strings.Cut(where, "?")
		return Effect{Call: string(method), Target: c.normalize("/" + where), Request: true}, true
	case rackServer:
		return c.answer("HTTP", bytes.HasPrefix(data, []byte("HTTP/1.")))
	case unixSocket:
		return c.answer("RPC", hasHeaders(data))
	}
	return Effect{}, false
}

// answer returns an effect for the first answer only. Later writes may continue this answer, or may
// answer callers that poll.
func (c call) answer(target string, is bool) (Effect, bool) {
	if !is || c.answered {
		return Effect{}, false
	}
	c.answered = true
	return Effect{Call: "answer", Target: target}, true
}

// hasHeaders reports whether the data of an HTTP/2 connection contain a HEADERS frame. An answer
// begins and ends with such a frame.
func hasHeaders(data []byte) bool {
	const frameHeader, headers = 9, 1
	for len(data) >= frameHeader {
		length := int(data[0])<<16 | int(data[1])<<8 | int(data[2])
		if data[3] == headers {
			return true
		}
		data = data[min(frameHeader+length, len(data)):]
	}
	return false
}

// fileTarget returns an effect's target, or false for a log, a pipe or a file of the kernel.
func (c call) fileTarget(fd int) (string, bool) {
	link := fmt.Sprintf("/proc/%d/fd/%d", c.tid, fd)
	name, err := os.Readlink(link)
	if err != nil || kernelFile(name) || slices.Contains(c.order.Logs, name) {
		return "", false
	}
	var st unix.Stat_t
	if unix.Stat(link, &st) != nil {
		return "", false
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return "disk", true
	case unix.S_IFREG, unix.S_IFDIR:
		return c.normalize(name), true
	}
	return "", false
}

// These parts of a path differ between runs.
var (
	uuids   = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
	names   = regexp.MustCompile(`csi-[0-9a-v]{16}`)
	numbers = regexp.MustCompile(`[0-9]+`)
)

func (s *tracing) normalize(path string) string {
	path = strings.TrimPrefix(path, s.order.Root)
	path = uuids.ReplaceAllString(path, "ID")
	path = names.ReplaceAllString(path, "NAME")
	return numbers.ReplaceAllString(path, "#")
}

type socketKind int

const (
	other socketKind = iota
	rackClient
	rackServer
	unixSocket
)

// socket returns a socket's kind, and caches it: inode numbers are hardly reused during a watch.
func (s *tracing) socket(link string) socketKind {
	kind, known := s.sockets[link]
	if !known {
		inode := strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")
		kind = s.socketKind(inode)
		s.sockets[link] = kind
	}
	return kind
}

func (s *tracing) socketKind(inode string) socketKind {
	for _, table := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", s.order.PID, table))
		if err != nil {
			continue
		}
		for line := range bytes.Lines(data) {
			fields := strings.Fields(string(line))
			if len(fields) < 10 || fields[9] != inode {
				continue
			}
			switch s.order.Rack {
			case portOf(fields[2]):
				return rackClient
			case portOf(fields[1]):
				return rackServer
			}
			return other
		}
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", s.order.PID))
	if err != nil {
		return other
	}
	for line := range bytes.Lines(data) {
		if fields := strings.Fields(string(line)); len(fields) > 6 && fields[6] == inode {
			return unixSocket
		}
	}
	return other
}

// portOf returns the port of an address in the format of /proc/net/tcp.
func portOf(address string) uint16 {
	_, port, _ := strings.Cut(address, ":")
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return 0
	}
	return uint16(n)
}
