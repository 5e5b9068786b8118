//go:build linux

package trace

import "golang.org/x/sys/unix"

// Newer architectures do not have these system calls.
func init() {
	for number, r := range map[uint64]rule{
		unix.SYS_OPEN:    {"openat", opens(0, 1)},
		unix.SYS_CREAT:   {"openat", path(0)},
		unix.SYS_MKDIR:   {"mkdirat", path(0)},
		unix.SYS_RMDIR:   {"unlinkat", path(0)},
		unix.SYS_UNLINK:  {"unlinkat", path(0)},
		unix.SYS_RENAME:  {"renameat", path(1)},
		unix.SYS_LINK:    {"linkat", path(1)},
		unix.SYS_SYMLINK: {"symlinkat", path(1)},
		unix.SYS_MKNOD:   {"mknodat", path(0)},
		unix.SYS_CHMOD:   {"fchmodat", path(0)},
	} {
		rules[number] = r
	}
}
