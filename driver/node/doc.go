// Package node implements CSI's node service.
//
// Service answers the node RPCs. A request is parsed once; the device is found by its serial and
// kept open and locked from there to the answer; the mount table is read; package filesystem makes
// the volume's filesystem ready; package mount mounts it. What is mounted stays the kernel's
// knowledge, which every call reads again.
//
// The service keeps one record for each volume, in memory and in the state directory: which disk it
// is. NodeUnstageVolume and NodeUnpublishVolume get an id and a path and no more. Records only make
// answers stricter, so a lost one harms nobody.
//
// Inspect reports, beside a running service, what the node sees of its volumes, and changes
// nothing.
//
// InstanceID finds out which instance this is. The package never talks to the rack: a node needs no
// token. Its RPCs need Linux; elsewhere they answer UNIMPLEMENTED.
package node
