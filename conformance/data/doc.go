// Package data checks what a rack and its driver do with the bytes of volumes: that what was
// written is there after every way in which a volume can travel, and that nothing else is.
//
// [Checks] is the table. Each [Check] makes volumes through the driver's controller on a [Bench],
// uses them in the Bench's instances through package guest, and removes what it made, whether it
// succeeds or not. Its error says which block of which volume is wrong, and how. What a check needs
// and the Bench lacks, [Check.Blocked] says.
//
// The package knows driver and rack by their APIs only, and neither Ginkgo nor testing.
package data
