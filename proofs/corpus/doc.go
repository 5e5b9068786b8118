// Package corpus proves the driver's first promise about data: it formats a disk only when the disk
// is proven blank, or proven to contain this driver's own unfinished format.
//
// # The corpus
//
// A generator makes a disk and a request, and knows the right answer. The disk is a sparse file
// behind a loop device, which a guest's sysfs and device directory show to the unmodified driver
// process. A gRPC call asks the driver to stage the disk. The function corpus lists the generators:
// filesystems, tables and headers that are whole, cut, wiped, nested, damaged or reduced to a copy;
// disks that cannot be read, are in use, or have another size or identity, from the start or from
// the moment of the inspection; unfinished formats and growths of the driver or of another program;
// and single bytes where a format could have a mark.
//
// There are three outcomes. The driver must format a blank disk, and a disk with an unfinished
// format of its own: otherwise a driver that refuses everything would pass. It must mount a healthy
// filesystem, and keep its bytes and the bytes behind it. It must refuse every other disk with a
// code and a reason, and change none of its bytes. Its evidence must be true: the name of the
// content, or an offset at which the disk is not zero. A decoy disk, whose serial differs in one
// letter, must stay blank.
//
// Bystanders, and files in which workloads have forged the driver's records (package proof), must
// be the same after every call.
//
// Every disk has its own seed, so a single disk can be made again. The test tries each generator
// once, the short form some for each outcome, and the long form all with one seed after another.
//
// # Features
//
// A second test makes filesystems with features: each option of the installed mkfs programs and
// each pair of options, each feature bit, each pair of values that tie a filesystem to another
// disk, and filesystems of which a part is on a second disk. The driver must mount each one and
// keep the bytes of its file, or refuse it: the refusal names a feature, is not INTERNAL, and
// changes neither disk. The test always tries the special values, and lets the seed choose some of
// the others. No image sets a bit without the structures that mkfs makes for it.
//
// # The mutation check
//
// guards_test.go lists the driver's guards, each with disks that only this guard protects. The test
// runs the driver without one guard at a time, and each of the guard's disks must then have a wrong
// outcome. Guards that protect the same disk are removed together. If a guard matters only in a
// race, a program in the driver's PATH waits for the trial's change, so the trial always wins the
// race.
//
// # What it does not prove
//
// If the driver created a disk blank, for filesystems only, it reads only samples and the regions
// in which filesystems, tables and labels have marks. If such a disk has other data in less than a
// hundredth of its size, the driver may format it. It reads every other disk whole.
//
// PROOF_ONLY is a regular expression that selects disks by their names. PROOF_ANSWERS prints the
// answer of each call.
package corpus
