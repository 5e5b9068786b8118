// Package mount reads mount tables and makes and removes mounts.
//
// A Table is what one mount namespace has mounted, Views are the tables of every namespace that can
// be seen. Both answer where a disk is mounted; AwaitNone waits until it is mounted nowhere.
//
// A Mount is a mount by its descriptor. New and Clone make a detached one, which has no place in
// any namespace until Attach moves it there. It is verified and configured before that, so no
// process that dies leaves a half-made mount behind: the kernel drops a detached mount with its
// last descriptor. Unmount is never lazy, because a lazy unmount reports success while the
// filesystem is still in use.
//
// The package never decides what may be mounted, formats nothing, and imports no CSI types. It
// needs Linux 5.12.
package mount
