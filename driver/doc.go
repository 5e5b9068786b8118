// Package driver serves Oxide disks as volumes of the Container Storage Interface.
//
// # The life of a volume
//
// A volume begins as a name that the orchestrator chose. CreateVolume derives the disk's name from
// it, a hash of exactly 20 bytes, and asks the rack to make the disk. For a blank one nothing is
// looked up before; for one from a snapshot or an image, only that. If the name is taken, the rack
// says so, and only then does the driver read what is there and compare. The disk's UUID becomes
// the volume's id. The name travels on in volume_context, because it is what the guest will see: an
// NVMe controller's serial number holds the first 20 bytes of the disk's name.
//
// ControllerPublishVolume attaches the disk to the instance that is the node. The rack answers with
// the disk; the driver believes the call only if that disk says that it is attached there. Name and
// size go into publish_context. A disk made by hand may have any name, so before its attach the
// driver looks whether another disk of the instance would show the same serial. An instance may
// have to be stopped for an attach, and if so the driver says it: it never stops anything.
//
// On the node, NodeStageVolume waits for the device with that serial to appear, proves that it is
// the one and only, and keeps it open to the end. It mounts what is one whole filesystem. It
// formats only what is proven blank: of the size that the controller has told, held by nobody, not
// known to blkid or the driver's own list of marks, and zero in every area where a filesystem, a
// partition table, a volume manager, a RAID, encryption or swap keeps one (areas.go). Before mkfs a
// mark of the volume is written to the disk, where no mkfs writes, and erased when mkfs's work is
// durable (format_mark.go): a format that was cut off is known as this volume's and done again,
// unless the filesystem has been used since. Then it grows what is smaller than its disk, an ext
// under a mark of the same kind (filesystem_check.go), and mounts it at the staging path.
// NodePublishVolume binds the mount, or the device for raw block volumes, to each workload's path.
// The way back is the same in reverse: unpublish, unstage, detach, delete; each succeeds when what
// it has to undo is not there. Before a mount is taken down the node looks into every mount
// namespace that it can see: a volume that somebody has there stays where it is, and the refusal
// names the process. No mount is taken down lazily. Deleted is only what carries this cluster's
// mark in its description, and the name that the mark stands for; it is read right before, and
// anybody else's disk or snapshot is refused and stays. What cannot be asked is never taken for
// gone: a rack that shows the token no project, or a device that does not answer whether somebody
// holds it, is an error.
//
// No step needs what an earlier one kept in memory. The rack, sysfs and the kernel's mount tables
// say what is so, so that any process may die anywhere, and a repeated call goes on where the other
// ended. A node does write down which disk a volume is, in a state directory: its calls to undo
// something are told an id and a path, and nothing in the kernel leads from those to a device that
// is not mounted. Records make answers stricter, and no call needs one.
//
// What nobody takes back leaks: the disk of a create whose caller never came again. Audit finds it,
// by the mark that every disk and snapshot carries, among what nobody wants (audit.go), and deletes
// it when it is told to and has seen it before.
//
// # How a call passes through
//
// Each RPC checks its request, does one thing, and builds its answer. What surrounds that is in one
// place each: interceptors for the log without secrets, metrics, panics, CSI's field limits and
// one call at a time for each object (interceptor.go); the words for what went wrong, with their
// gRPC codes (package csierr); names and ids, of the orchestrator and of the rack (package volume);
// and the rack's answers, checked before anybody decides from them (package rack).
package driver
