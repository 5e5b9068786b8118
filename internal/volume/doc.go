// Package volume parses and checks the names, ids and parameters by which CSI, a StorageClass and
// the rack describe a volume. Its functions are pure: no call, no file, no clock.
//
// Files: name.go (names, ids, and the keys of the contexts), tag.go (the ownership tag in the
// description of a disk or snapshot), capacity.go, capability.go, parameters.go and mkfs_options.go
// (the properties of a requested volume), topology.go, mount_flags.go.
//
// For an invalid request these functions return a csierr.Error, which the caller returns unchanged.
package volume
