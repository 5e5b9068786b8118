//go:build !race

package harness

// RaceDetector reports whether this binary has the race detector. Programs that it builds have
// the detector if this binary has it.
const RaceDetector = false
