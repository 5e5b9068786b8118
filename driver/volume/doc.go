// Package volume has the words in which CSI, a StorageClass and the rack speak of a volume, and
// what follows from them alone: no call, no file, no clock.
//
// To read: name.go (names and ids, and the keys of the contexts), tag.go (what the driver writes
// into the description of a disk or snapshot to know it again), capacity.go, capability.go,
// parameters.go and mkfs_options.go (what may be asked of a volume), topology.go, mount_flags.go.
//
// A function here answers a malformed request with a csierr.Error, which the caller returns as is.
package volume
