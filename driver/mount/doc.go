// Package mount reads mount tables and makes and removes mounts.
//
// A Table contains the mounts of the driver's mount namespace. Views are the tables of all visible
// mount namespaces. Both list the mounts of a disk; AwaitNone waits until there are none.
//
// A Mount is a descriptor of a mount. New and Clone make a detached mount, which is not in any
// namespace until Attach moves it to a path. The driver verifies and configures it before Attach.
// If the driver dies, the kernel drops a detached mount with its last descriptor, so no half-made
// mount is left. Unmounting is never lazy, because a lazy unmount reports success while the
// filesystem is still in use.
//
// The package never decides what may be mounted, formats nothing, and imports no CSI types. It
// needs Linux 5.12.
package mount
