// Package corpus proves the driver's first promise about data: it formats a disk only when the
// disk is proven blank, or proven to hold this driver's own unfinished format.
//
// # The corpus
//
// A generator makes a disk and a request, and knows what must happen. The disk is a sparse file
// behind a loop device. It is shown in a guest's sysfs and device directory to the unmodified
// driver process, and a call over gRPC asks the driver to stage it. There are many kinds of
// disks:
//
//   - disks with filesystems: whole, cut short, wiped at either end, nested, or reduced to one
//     copy of a superblock;
//   - disks with partition tables, volume managers, RAIDs, encryption, swap and databases;
//   - disks with a single byte at a place that could contain a mark;
//   - disks that cannot be read, or are too large, too small, in use or read-only;
//   - disks that are the wrong ones by serial, number or birth, from the start or from the
//     moment at which the driver inspects them;
//   - disks with the mark of an unfinished format, of this volume or of another one;
//   - filesystems of other volumes, with foreign marks in their data, or with something behind
//     them on a larger disk;
//   - ext3 and ext4 whose group descriptors or whose copies of them are damaged.
//
// There are three outcomes. A blank disk, and an unfinished format of the driver's own, gets the
// wanted filesystem: without such disks a driver that refuses everything would pass. A healthy
// filesystem is mounted, and its bytes and the bytes behind it stay the same. Everything else is
// refused with a code, a reason, and evidence that is true: it names what was put on the disk,
// or an offset at which the disk is indeed not zero. Not one byte of such a disk may change.
// Each disk has a blank decoy beside it, whose serial differs in one letter. The decoy must stay
// blank.
//
// The guest also has bystanders (package proof): a mounted disk, a disk that is the journal of
// an ext4 or a device of a btrfs, and a blank disk. They are checked after every call and
// compared byte for byte at the end. Workloads write forged records of their own volume into
// files, at the places where the driver looks for its records. The files must be the same after
// every stage, and the driver must not format or repair a disk because of them.
//
// Every disk has its own seed for random choices, so each can be made again alone. Every generator
// is tried once. The short form tries some of each outcome, and the long form tries all of them
// with one seed after another.
//
// # Features
//
// A second proof makes filesystems with features: each option of the installed mkfs programs and
// each pair of them, each bit of each word of features, each pair of values that tie a
// filesystem to another disk, and filesystems that have a part on a second disk. The driver must
// mount each, and its file must have the same bytes; or the driver must refuse it and name a
// feature, without INTERNAL and without a write to it or to the second disk. All special
// values are tried, and a part of the others, chosen by the seed. The short form tries some of
// them, and the long form tries all. Some bits need structures that only mkfs can make, and without
// them the filesystem is damaged. These bits are not set alone.
//
// # The mutation check
//
// A corpus is worth as much as it would notice. So the driver's guards are listed
// (guards_test.go), each with its text in the source and with the disks that only this guard
// protects. One driver is built in which every guard can be switched off. It is run once for
// each guard, without that guard, and the guard's disks must then have a wrong outcome. The
// check fails for a guard whose text is not in the source any more, and for a guard whose
// absence no trial notices. Guards that protect the same disk one after the other are removed
// together. Some races are prevented by a guard alone. The trials win them on purpose: a program
// in the driver's PATH stops before it begins, and the trial changes something in the meantime.
//
// # What it does not prove
//
// If the driver made a disk blank, for filesystems only, it does not read the places where
// nothing keeps a mark. If such a disk holds data all the same, in less than a hundredth of its
// size and only where no filesystem, table or label has a mark, the driver may format it. Every
// other disk is read whole. The holders do not include a loop device on top of the disk, because
// an exclusive open does not notice it.
//
// # Running it
//
//	go test -short ./proofs/corpus                                the short form
//	go test -race ./proofs/corpus
//	PROOF_SEED=7 PROOF_DURATION=10m go test -timeout=0 ./proofs/corpus
//	PROOF_ONLY='LUKS|swap' PROOF_ANSWERS=1 go test -v ./proofs/corpus
//
// PROOF_ONLY is a regular expression that selects disks by their names. PROOF_ANSWERS prints the
// answer of each call.
package corpus
