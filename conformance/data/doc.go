// Package data checks what a rack and its driver do with the bytes of volumes: data that was
// written is still there after every way in which a volume can travel, and nothing else is there.
//
// [Checks] is the table. Each [Check] creates volumes through the driver's controller on a
// [Bench], uses them in the Bench's instances through package guest, and removes what it created,
// whether it succeeds or not. Its error names the wrong block of the volume and describes the
// difference. [Check.Blocked] names what a check needs and the Bench lacks.
//
// The package knows driver and rack by their APIs only. It imports neither Ginkgo nor testing.
package data
