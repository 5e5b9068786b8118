// Package powercut proves that the driver's promises about a disk hold after a power cut.
//
// # The proof
//
// A disk is a file of a FUSE filesystem of this process, behind a loop device, so that the proof
// sees every write, discard and flush (package loopdev/flakydisk). The unmodified driver stages
// volumes of every filesystem on such disks: from the blank disk on, after the disk has grown,
// with a filesystem that needs a repair or the recovery of its journal, after an interrupted
// format and an interrupted growth, and as a raw device. A workload makes, replaces, overwrites
// and removes files. It adds a note to the disk's log for each promise that it got: an
// acknowledged fsync, or an unstage.
//
// The images are made from the log. For some flushes of each scenario, or for every flush in the
// long form, there is one image with everything before the flush and nothing after it. Of the
// writes between two flushes an image has all up to one record, all but one, one alone, or some,
// in any order, and torn at 512 bytes. An image that is equal to an earlier one is left out. A
// driver on an instance that does not know the volume stages each image. It must answer OK, and
// then:
//
//   - all acknowledged data are there, byte for byte;
//   - a filesystem that had been in use was not formatted;
//   - a workload can use the filesystem and its whole disk;
//   - no record of the driver is left;
//   - other disks of the instance have not changed (package proof);
//   - files in which the workload has forged records of its volume, at the places of the driver's
//     own records, have not changed, and the driver has done nothing because of them.
//
// Three refusals are right:
//
//   - an ext4 or a btrfs whose superblock of several sectors was torn while the kernel wrote it;
//   - an xfs with a block of metadata that was torn so that its first sector is new, because the
//     kernel's recovery then takes the whole block for written;
//   - a format for btrfs with a tree block of mkfs that was torn so that its head is missing,
//     because then nothing distinguishes the rest from foreign data.
//
// If the driver refuses an image, the kernel must not be able to mount it either. On disks with
// blocks of 4096 bytes, which are the default of the driver, only the last refusal can happen.
//
// A person may decide to replace a torn superblock by a copy. e2fsck -p, which the driver runs,
// does not do this. With e2fsck -y the complete content of an ext4 came back in every trial. The
// copies of a btrfs are older, so that "btrfs rescue super-recover" loses the data that were
// synced last. The unfinished format never held data.
//
// # The proof of the proof
//
// Each flush of the driver is removed in turn. Then some image must be wrong, or a failed flush
// must stay unreported. A disk that answers flushes without doing anything must lose acknowledged
// data.
//
// # Disks that fail
//
// Sectors that a stage reads or writes fail, once or always. The driver must not format or mount
// on a guess, it must give the right reason, and the call must converge when the disk works
// again. A filesystem that cannot be grown to the size of its disk may be used without growing,
// if its health reports this.
//
// The long form makes every request of every scenario fail: in its first sector, its last one and
// one in between, and in all its sectors if there are at most eight. A disk that is read whole,
// to prove that it is blank, has 262,144 sectors, which are read in about a thousand requests. A
// request with a bad sector fails completely, so its other sectors would show the same result.
// The scenarios take turns. The figure contains the number of sectors that failed, and the number
// of all sectors.
//
// A disk fails while a workload uses it, and a flush fails while a volume is removed. The caller
// gets an error, and the volume can be removed from the disk.
//
// # What it does not prove
//
// The seed determines the workload and the images, but not what the kernel writes, and when. A
// run with the same seed has similar logs, but not the same ones. So the image of a failure is
// kept as a file. An xfs or a btrfs grows while it is mounted, over the records of its growth.
// The records therefore stay in its free space. They have no effect on a filesystem of another
// size than the one that they name.
//
// # Running it
//
//	go test -short ./proofs/powercut                                the short form
//	go test -race ./proofs/powercut
//	PROOF_SEED=7 PROOF_DURATION=10m go test -timeout=0 ./proofs/powercut
//
// The images and the sectors take that time each. Two cores check about 50 images in a second, or
// about 15 with the race detector: 100,000 take 35 minutes, or two hours. All sectors of one seed
// take hours. The figures contain the maximum memory of the process: less than 2 GiB, with the
// race detector too.
//
// PROOF_ONLY is the name of the flush to remove.
package powercut
