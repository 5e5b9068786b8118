//go:build !race

package sanity

// raceDetector says that this binary carries the race detector; the binaries it builds then do too.
const raceDetector = false
