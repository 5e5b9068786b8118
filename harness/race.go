//go:build race

package harness

// RaceDetector reports whether this binary has the race detector. The binaries that it
// builds have it, too.
const RaceDetector = true
