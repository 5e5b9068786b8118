// Package corpus proves the driver's first promise about data: it formats a disk only when the disk
// is proven blank, or proven to contain this driver's own unfinished format.
//
// # The corpus
//
// A generator makes a disk and a request, and states the right answer. The disk is a sparse file
// behind a loop device, which a guest view shows to the unmodified driver process. A gRPC call asks
// the driver to stage the disk. The function corpus lists the generators: filesystems, tables and
// headers that are whole, cut, wiped, nested, damaged or reduced to a copy; disks that cannot be
// read, are in use, or have a wrong size or identity, from the start or after the driver has
// inspected them; unfinished formats and growths of the driver or of another program; and single
// bytes where a format could have a mark.
//
// There are three outcomes. The driver must format a blank disk, and a disk with its own unfinished
// format. A driver that refuses every disk fails on these two. The driver must mount a healthy
// filesystem, and keep its files and the bytes behind it. It must refuse every other disk with a
// code and a reason, and change none of its bytes. The evidence must be true: the name of the
// content, or an offset at which the disk is not zero. A decoy disk, whose serial differs in one
// letter, must stay blank.
//
// No call may change a bystander (a disk that no call names), or a file in which a workload has
// forged the driver's records (package proof).
//
// A disk depends only on the seed and its generator's name. By default, the test tries each
// generator once. The short form tries some for each outcome, the long form all with many seeds.
//
// # Features
//
// A second test makes filesystems with features: each option of the installed mkfs programs and
// each pair of options, each feature bit, each pair of values that refer to another disk, and
// filesystems that use a second disk. The driver must mount each one and keep its payload, or
// refuse it. A refusal must name a feature, must not be INTERNAL, and must change neither disk. The
// test always tries the special values, and the seed chooses some of the others. No image has a
// feature bit without the structures that mkfs makes for it.
//
// # Removed guards
//
// guards_test.go lists the driver's guards, each with disks that only this guard protects. The test
// runs the driver without one guard at a time, and each of the guard's disks must then have a wrong
// outcome. Guards that protect the same disk are removed together. If a guard matters only in a
// race, a script in the driver's PATH waits until the trial has changed the disk, so the trial
// always wins the race.
//
// # What it does not prove
//
// If the driver has created a disk blank and for filesystems only, it reads only samples, and the
// regions in which filesystems, tables and labels have marks. So it may format this disk if other
// data fill less than a hundredth of it. It reads every other disk completely.
//
// The environment variable PROOF_ONLY is a pattern for the names of the disks to try. If
// PROOF_ANSWERS is set, the test logs the answer of each call.
package corpus
