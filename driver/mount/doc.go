// Package mount reads mount tables and makes and removes mounts.
//
// A Table contains the mounts of the driver's mount namespace. Views are the tables of all visible
// mount namespaces. Both list where a disk is mounted; AwaitNone waits until it is mounted nowhere.
//
// A Mount is a descriptor of a mount. New and Clone make a detached mount, which is not in any
// namespace until Attach moves it to a path. It is verified and configured before that, so no
// process that dies leaves a half-made mount behind: the kernel drops a detached mount with its
// last descriptor. Unmounting is never lazy, because a lazy unmount reports success while the
// filesystem is still in use.
//
// The package never decides what may be mounted, formats nothing, and imports no CSI types. It
// needs Linux 5.12.
package mount
