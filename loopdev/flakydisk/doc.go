// Package flakydisk serves disks that fail as real disks do. The disks are files of a FUSE
// filesystem, to which package loopdev attaches block devices. No kernel module is needed.
//
// A [Disk] keeps a log of the writes, discards and flushes that reached it, in their order,
// together with the notes that its user adds. From the log, [Replay] rebuilds the content that
// the disk could have after a power cut at any point: everything that was flushed, and of the
// rest any part, torn at [SectorBytes]. Images are sparse and share their common pages, so
// that thousands of them cost little more than their differences.
//
// A [Fault] makes reads, writes or flushes of some sectors fail, hang, take long, or succeed
// without effect, for a number of times or until it is removed.
//
// Requests are logged in the order in which they are served. A flush covers all writes before
// it, including one that was under way when the flush arrived. A real disk might lose that
// write.
//
// A process that serves disks must not wait for them: it must not call sync(2). If one of its
// threads needs memory, the kernel may make the thread wait until something is written to such
// a disk. Other threads serve that write, but not while Go's garbage collector stops all
// threads and waits for the first one. So a process that allocates much while its disks are in
// use has to collect its garbage at other times (runtime/debug.SetGCPercent).
//
// A process that serves disks may be killed at any time, even while it waits for one of them.
// A small guard process then unmounts its filesystem by force, and every process that waits
// for its disks gets an error. A loop device stays until a process detaches it.
//
// Serving needs Linux, /dev/fuse, CAP_SYS_ADMIN, a shell and umount. The rest is portable.
package flakydisk
