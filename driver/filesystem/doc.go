// Package filesystem decides what a disk holds and makes a volume's filesystem ready to be mounted.
//
// Preparation.Run is the entry for the node. It scans the regions of the open device where
// filesystems, partition tables, RAIDs and volume managers keep their signatures, asks blkid, and
// judges the scan: blank, one filesystem, an unfinished format of this volume, or an error that
// names the evidence. Only then does it write: it formats a disk that is proven blank, repeats its
// own unfinished format, or checks and grows the filesystem that is there.
//
// A disk that was not created blank for filesystems is read whole before it is formatted. ZeroScans
// keeps these reads going when the caller gives up; the repeated call joins them.
//
// While a format or a growth is under way, a Record on the disk itself names the volume and the
// step. It is durable before the first other write and erased after the last one, so a process that
// dies at any instruction leaves either an untouched disk or one that the next call can finish.
//
// The package attaches no mount to a path: it uses detached mounts only to thaw. It imports no CSI
// types, so the proof that only blank disks are formatted can be reviewed alone. Reading and
// judging a disk needs Linux; the layouts (regions, superblocks, records) do not.
package filesystem
