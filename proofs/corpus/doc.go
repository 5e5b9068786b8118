// Package corpus proves the driver's first promise about data: it formats a disk only when the
// disk is proven blank, or proven to contain this driver's own unfinished format.
//
// # The corpus
//
// A generator makes a disk and a request, and knows what must happen. The disk is a sparse file
// behind a loop device. It is shown in a guest's sysfs and device directory to the unmodified
// driver process, and a call over gRPC asks the driver to stage it. The families of generators are
// in the function corpus: filesystems, tables and headers whole, cut, wiped, nested, damaged or
// reduced to a copy; disks that cannot be read, are in use, of another size or another identity,
// from the start or from the moment of the inspection; unfinished formats and growths, the
// driver's own and foreign ones; and single bytes where a mark could be.
//
// There are three outcomes. A blank disk, or one with an unfinished format of the driver's own,
// gets the wanted filesystem: without such disks a driver that refuses everything would pass. A
// healthy filesystem is mounted, and its bytes and the bytes behind it stay the same. Every other
// disk is refused with a code, a reason, and true evidence: the name of its content, or an offset
// at which it is not zero. Not one byte of such a disk may change. Each disk has a blank decoy
// beside it, whose serial differs in one letter, and which must stay blank.
//
// Bystanders, and files in which workloads have forged the driver's records (package proof), must
// be the same after every call.
//
// Every disk has its own seed, so each can be made again alone. Every generator is tried once. The
// short form tries some of each outcome, and the long form all of them with one seed after another.
//
// # Features
//
// A second test makes filesystems with features: each option of the installed mkfs programs and
// each pair of options, each bit of each word of features, each pair of values that tie a
// filesystem to another disk, and filesystems with a part on a second disk. The driver must mount
// each, with the same bytes in its file, or refuse it: the refusal names a feature, is not
// INTERNAL, and changes neither disk. The special values are always tried, and of the others the
// seed chooses some. Some bits need structures that only mkfs makes, and are not set alone.
//
// # The mutation check
//
// The driver's guards are listed with the disks that only this guard protects (guards_test.go). The
// driver runs without each guard in turn, and each of these disks must then have a wrong outcome.
// Guards that protect the same disk one after the other are removed together. Some guards only
// matter in a race. Their trials always win it: a program in the driver's PATH waits, and the trial
// changes something in the meantime.
//
// # What it does not prove
//
// If the driver created a disk blank, for filesystems only, it reads only samples and the places
// where filesystems, tables and labels have marks. If such a disk has other data all the same, in
// less than a hundredth of its size, the driver may format it. It reads every other disk whole.
//
// PROOF_ONLY is a regular expression that selects disks by their names. PROOF_ANSWERS prints the
// answer of each call.
package corpus
