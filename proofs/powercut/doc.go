// Package powercut proves that what the driver promises of a disk holds after a power cut.
//
// # The proof
//
// A disk is a file of a FUSE filesystem of this process behind a loop device, so that every write,
// discard and flush is seen (package loopdev/flakydisk). The unmodified driver stages volumes of
// every filesystem on such disks: from the blank disk on, after the disk has grown, with a
// filesystem that needs a repair or the recovery of its journal, after a format and a growth that
// were cut off, and as a raw device. A workload makes, replaces, overwrites and removes files, and
// notes in the disk's log what it may rely on: an fsync that was acknowledged, or an unstage.
//
// From the log come the images: for every flush one with all before it and nothing after, and of
// what was written between two flushes all until a record, all but one, one alone, some, in any
// order, and torn at 512 bytes. Images that are equal to one before are left out. A driver on an
// instance that does not know the volume stages each. It must say OK; then all that was
// acknowledged is there, byte for byte; a filesystem that was ever to be used was not formatted; it
// can be used, on its whole disk; and no record of the driver is left. Other disks of the instance
// do not change (package proof). Among the files are some in which the workload has forged records
// of its volume, where the driver has its own: they are equal, and nothing is done because of them.
// There are three refusals
// that are right: an ext4 or a btrfs whose superblock, of several sectors, was torn while the
// kernel wrote it; an xfs of which a block of metadata was torn so that its first sector is new,
// which the kernel's recovery takes for written; and a format for btrfs of which mkfs wrote a tree
// block that was torn so that its head is missing, for then nothing tells the rest from foreign
// data. Whatever is refused, the kernel is asked, too, and must not mount it. On disks with blocks
// of 4096 bytes, which the driver makes by default, only the last can happen.
//
// A torn superblock can be replaced by a copy, which is a person's decision: e2fsck -p, which the
// driver runs, does not do it. With e2fsck -y all of an ext4 came back in every trial; the copies
// of a btrfs are older, so that "btrfs rescue super-recover" gives up what was synced last. The
// unfinished format never held data.
//
// # The proof of the proof
//
// Each flush is taken out of the driver in turn, and some image of what it then leaves behind must
// be wrong, or a flush that fails must go unheard. A disk that answers flushes without doing
// anything must lose what was acknowledged.
//
// # Disks that fail
//
// Sectors that a stage reads or writes fail, once or always: nothing may be formatted or mounted on
// a guess, the reason has to be right, and the call has to converge when the disk is in order. A
// filesystem that cannot be grown to its disk may be used as it is, if its health says so.
//
// The long form strikes every request of every scenario, in its first and its last sector and one
// in between, and in all its sectors if there are at most eight. A disk that is read whole, to
// prove that it is blank, has 655,360 sectors, and is read in some thousand requests: a request
// that a bad sector is in fails whole, so that the others of its sectors would show the same again.
// The scenarios take turns; the figure says how many sectors failed, of how many.
//
// A disk fails under a workload, and one flush fails when a volume is taken back: the caller hears
// of it, and the volume can be taken from the disk.
//
// # What it does not prove
//
// The seed decides the workload and the images. What the kernel writes, and when, is its own: a run
// with the same seed has similar logs, not the same. So the image of a failure is kept, as a file.
// An xfs or a btrfs grows while it is mounted, over the records of its growth, which therefore stay
// in its free space; they bind nobody to a filesystem of another size than they name.
//
// # Running it
//
//	go test -race ./proofs/powercut                                 the short form
//	PROOF_SEED=7 PROOF_DURATION=10m go test -timeout=0 ./proofs/powercut
//
// The images and the sectors take that time each. Two cores check some 50 images in a second, with
// the race detector some 15: 100,000 take 35 minutes, or two hours. All sectors of one seed are
// more than 100,000, and take most of a day. The figures tell the most memory that the process had:
// less than 2 GiB, with the race detector too.
//
// PROOF_ONLY chooses a flush that is taken out, by its name.
package powercut
