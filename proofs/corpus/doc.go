// Package corpus proves the driver's first promise about data: it formats a disk only when that is
// proven blank, or proven to be its own unfinished format.
//
// # The corpus
//
// A generator makes a disk, says what is asked of it, and knows what must happen. The disk is a
// sparse file behind a loop device, shown in a guest's sysfs and device directory to the unmodified
// driver process, which is asked over gRPC to stage it. There are disks with filesystems: whole,
// cut short, wiped at either end, nested, or reduced to one copy of a superblock. There are disks
// with partition tables, volume managers, RAIDs, encryption, swap and databases; with a single byte
// at a place where something could have its mark; disks that cannot be read; disks that are too
// large, too small, held, read-only, or another's by serial, number or birth, from the start or
// from the moment at which the driver looks; disks with the mark of an unfinished format, the
// volume's own or not; and filesystems of other volumes, with others' marks among their data, or
// with something behind them on a larger disk.
//
// What must happen is one of three. A blank disk, and an own unfinished format, gets the wanted
// filesystem: without those a driver that refuses everything would pass. A healthy filesystem is
// mounted and has the bytes it had, and so has what lies behind it. Everything else is refused with
// a code, a reason, and evidence that is true: it names what was put there, or an offset at which
// the disk is indeed not zero; and not one byte of the disk has changed. Beside each disk lies a
// blank decoy, its serial different in one letter, that must stay blank.
//
// The guest has bystanders besides (package proof): a mounted disk, one that is the journal of an
// ext4 or a device of a btrfs, and a blank one. They are looked at after every call and compared
// byte for byte at the end. Workloads write forged records of their very volume into files, where
// the driver looks for its own; the files are equal after every stage, and no disk is formatted or
// repaired because of them.
//
// Chance is seeded for every disk by itself, so that each can be made again alone. The short form
// tries every generator once, the long one goes through all of them with one seed after another.
//
// # Features
//
// A second proof makes filesystems with features: each option of the installed mkfs programs and
// each pair of them, each bit of each word of features, each pair of what ties a filesystem to
// another disk, and filesystems that have a part on a second disk. Each is mounted, and its file
// has the bytes it had; or it is refused by the name of a feature, never as INTERNAL, and neither
// it nor the second disk is written. The short form takes what is special and a part of the rest by
// its seed, the long form all. A bit whose structures only mkfs can make is not set by itself:
// without them the filesystem is damaged.
//
// # The mutation check
//
// A corpus proves as much as it would notice. So the driver's guards are listed (guards_test.go),
// each with its text in the source and the disks that it alone keeps from harm. One driver is built
// in which every guard can be switched off, and is run once for each guard without it: the disks of
// the guard must then come out wrong. A guard whose text is not in the source any more fails the
// check, and so does one whose absence nothing notices. Where two guards stand one behind the
// other, they are taken away together. Races that only a guard decides are won on purpose: a
// program in the driver's PATH stops before it begins, and something is changed meanwhile.
//
// # What it does not prove
//
// Of a disk that the driver made blank, for filesystems alone, bytes where nothing keeps a mark are
// not read: if such a disk holds data after all, in less than a hundredth of its size and where no
// filesystem, table or label has a mark, it may be formatted. Every other disk is read whole, and
// there is no such place. A loop device on top of the disk, which no exclusive open sees, is not
// among the holders.
//
// # Running it
//
//	go test -race ./proofs/corpus                                 the short form
//	PROOF_SEED=7 PROOF_DURATION=10m go test -timeout=0 ./proofs/corpus
//	PROOF_ONLY='LUKS|swap' PROOF_ANSWERS=1 go test -v ./proofs/corpus
//
// PROOF_ONLY chooses disks by a regular expression of their names, and PROOF_ANSWERS prints what
// each call answered.
package corpus
