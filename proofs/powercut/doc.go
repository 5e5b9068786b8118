// Package powercut proves that the driver's promises about a disk hold after a power cut.
//
// # The proof
//
// A disk is a file of a FUSE filesystem, behind a loop device. This process serves the filesystem,
// so the proof sees every write, discard and flush (package loopdev/flakydisk). The unmodified
// driver stages volumes of every filesystem on such disks: on a blank disk, on one that has grown,
// with a filesystem that needs a repair or the recovery of its journal, after an interrupted format
// or growth, and as a raw device. A workload creates, replaces, overwrites and removes files. When
// an fsync or an unstage has been acknowledged, the proof adds a note to the disk's log. After this
// note, the data must survive a power cut.
//
// The proof makes images of the disk from the log. For some flushes of each scenario, or for every
// flush in the long form, it makes an image with all writes before the flush and none after it.
// Other images also have some of the writes until the next flush: all up to a chosen write, all but
// one, one alone, or some in any order, whole or torn at 512 bytes. Equal images are tried once.
// Then a driver that has no record of the volume stages each image. It must answer OK. After this:
//
//   - all acknowledged data are there, byte for byte;
//   - a filesystem that had been in use was not formatted;
//   - a workload can use the filesystem and its whole disk;
//   - no record of the driver is left;
//   - neither the guest's other disks nor files in which the workload has forged the driver's
//     records have changed (package proof), and the driver has ignored the forged records.
//
// The driver may refuse three kinds of images:
//
//   - an ext4 or a btrfs whose superblock of several sectors was torn while the kernel wrote it;
//   - an xfs with a block of metadata that was torn so that its first sector is new, because the
//     kernel's recovery then assumes that the whole block was written;
//   - a format for btrfs with a tree block of mkfs that was torn so that its head is missing,
//     because then nothing distinguishes the rest from foreign data.
//
// If the driver refuses an image, the kernel must not be able to mount it either. On disks with
// blocks of 4096 bytes, the driver's default, only the last refusal can happen.
//
// To test itself, the proof removes one flush of the driver at a time. It must then find a wrong
// image or an unreported failure. On a disk that ignores flushes, it must find lost data.
//
// # Disks that fail
//
// The proof makes sectors fail that a stage reads or writes, once or always. The driver must format
// neither a used disk nor one that it cannot read, and must return the right reason. The repeated
// call must succeed when the disk works again. If a filesystem cannot be grown to the size of its
// disk, the driver may mount it, and must then report this in the volume's health.
//
// In other tests the disk fails while a workload uses it, or a flush fails while the driver
// unstages a volume. The caller must get an error, and must then be able to unstage the volume.
//
// # What it does not prove
//
// The seed determines the workload and the images, but not what the kernel writes, and when. Two
// runs with one seed have similar logs, but not equal ones, so the test saves a failed image in a
// file.
//
// In the long form the tests of images and of sectors each take the time of the proof. All sectors
// of one seed take hours. PROOF_ONLY is the name of the flush to remove.
package powercut
