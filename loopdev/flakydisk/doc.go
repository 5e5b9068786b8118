// Package flakydisk serves disks that fail as real ones do: files of a FUSE filesystem, to be given
// block devices by package loopdev. No kernel module is needed.
//
// A [Disk] keeps a log of what reached it: writes, discards and flushes, in their order, with what
// its user has noted in between. From the log, [Replay] rebuilds what the disk would hold after a
// power cut at any point: all that was flushed, and of the rest any part, torn at [SectorBytes].
// Images are sparse and share the pages that they have in common, so that thousands of them cost
// little more than their differences.
//
// A [Fault] lets reads, writes or flushes of some sectors fail, hang, take long, or be answered
// without effect, for a number of times or until it is removed.
//
// Requests are logged in the order in which they are served. A flush covers the writes before it,
// also one that was under way when the flush arrived: then a real disk might lose it.
//
// A process that serves disks must not wait for them: it must not call sync(2). If one of its
// threads needs memory, the kernel may let it wait until something is written to such a disk; other
// threads serve that, but not while Go's garbage collector stops them all and waits for the first
// one. So a process that allocates much while its disks are in use has to collect its garbage when
// they are not (runtime/debug.SetGCPercent).
//
// A process that serves disks may be killed at any time, also while it waits for one of them: what
// it has mounted is unmounted by force then, and whatever waits for its disks gets an error. A
// small process of its own sees to that. A loop device stays until somebody detaches it.
//
// Serving needs Linux, /dev/fuse, CAP_SYS_ADMIN, a shell and umount. The rest is portable.
package flakydisk
