package driver

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The reasons a node gives. Each names one condition a person can act on.
const (
	// ReasonDeviceNotFound: no device of this instance carries the disk's serial. Look whether the
	// disk is attached to this instance, and at the serials the message lists.
	ReasonDeviceNotFound Reason = "DeviceNotFound"
	// ReasonDeviceNotUnique: two devices carry the same serial. Detach one of the two disks; their
	// names share the first 20 bytes.
	ReasonDeviceNotUnique Reason = "DeviceNotUnique"
	// ReasonDeviceChanged: the device became another one while the driver worked on it. The call is
	// safe to repeat.
	ReasonDeviceChanged Reason = "DeviceChanged"
	// ReasonDeviceWrongSize: the device's size is not the disk's. Compare the two with the rack.
	ReasonDeviceWrongSize Reason = "DeviceWrongSize"
	// ReasonDeviceDiffers: the device is not what the rack says of the disk: it has blocks of another
	// size. Another disk may have taken the volume's place.
	ReasonDeviceDiffers Reason = "DeviceDiffers"
	// ReasonDeviceHeld: the device is mounted or held open exclusively elsewhere on the node. The
	// message says where if it can be seen.
	ReasonDeviceHeld Reason = "DeviceHeld"
	// ReasonDeviceReadOnly: the device cannot be written, and the request needs that.
	ReasonDeviceReadOnly Reason = "DeviceReadOnly"
	// ReasonDeviceUnreadable: the device answers reads with errors, so nothing can be said of it.
	ReasonDeviceUnreadable Reason = "DeviceUnreadable"
	// ReasonDiskNameMissing: neither context names the disk. A static volume needs the volume
	// attribute diskName, or a controller that publishes it.
	ReasonDiskNameMissing Reason = "DiskNameMissing"
	// ReasonDiskNotBlank: the disk holds something that is not the wanted filesystem, or the mark of
	// an unfinished format of another volume. The driver never overwrites; the message says what was
	// found and where.
	ReasonDiskNotBlank Reason = "DiskNotBlank"
	// ReasonDiskSizeUnknown: the disk is blank, but nobody has told the node how large it is to be, so
	// it is not formatted. Let a controller publish the volume, or make the filesystem by hand.
	ReasonDiskSizeUnknown Reason = "DiskSizeUnknown"
	// ReasonWrongFilesystem: the disk holds a filesystem, but not the volume's own: its UUID is
	// another one. Another disk may have taken the volume's place; the message names both UUIDs.
	ReasonWrongFilesystem Reason = "WrongFilesystem"
	// ReasonDeviceLocked: another process of the driver, or a program it started, works on the device.
	// Repeat the call later.
	ReasonDeviceLocked Reason = "DeviceLocked"
	// ReasonDiskProofPending: the disk is being read whole before it is formatted. Repeat the call.
	ReasonDiskProofPending Reason = "DiskProofPending"
	// ReasonFilesystemDamaged: the filesystem's check found what it may not repair by itself.
	ReasonFilesystemDamaged Reason = "FilesystemDamaged"
	// ReasonFilesystemTooLarge: the filesystem claims more bytes than its device has.
	ReasonFilesystemTooLarge Reason = "FilesystemTooLarge"
	// ReasonFilesystemNotGrown: the filesystem is smaller than its disk, and stays so, because
	// something lies behind it or because nothing grows it. Only a volume's health has this reason.
	ReasonFilesystemNotGrown Reason = "FilesystemNotGrown"
	// ReasonFilesystemFailed: the kernel made the filesystem read-only, or shut it down, after
	// errors. Look at the kernel's log; unpublish the volume everywhere, then stage it again.
	ReasonFilesystemFailed Reason = "FilesystemFailed"
	// ReasonMkfsOptions: mkfsOptions holds what the driver does not allow for this filesystem.
	ReasonMkfsOptions Reason = "MkfsOptionsInvalid"
	// ReasonMountFlags: a mount flag is one that a volume may not have.
	ReasonMountFlags Reason = "MountFlagsUnsupported"
	// ReasonStagedDifferently: something else than the request asks for is mounted at the path, or the
	// volume is another disk on this node than the request names. Unstage it first.
	ReasonStagedDifferently Reason = "StagedDifferently"
	// ReasonNotStaged: the volume is not mounted at the staging path. Stage it again.
	ReasonNotStaged Reason = "NotStaged"
	// ReasonPublishedDifferently: the target path is taken by a publication with other arguments.
	ReasonPublishedDifferently Reason = "PublishedDifferently"
	// ReasonPublishedElsewhere: the access mode allows one target path, and the volume has one.
	ReasonPublishedElsewhere Reason = "PublishedElsewhere"
	// ReasonStillMounted: mounts of the volume are left on the node; unpublish them first.
	ReasonStillMounted Reason = "StillMounted"
	// ReasonTargetNotEmpty: the target path holds files of somebody, and is left alone.
	ReasonTargetNotEmpty Reason = "TargetNotEmpty"
	// ReasonPathInvalid: a path of the request is not absolute, or of the wrong kind.
	ReasonPathInvalid Reason = "PathInvalid"
	// ReasonVolumeNotAtPath: the path shows no volume, or another one.
	ReasonVolumeNotAtPath Reason = "VolumeNotAtPath"
	// ReasonVolumeUnknownToNode: this node knows nothing of the volume.
	ReasonVolumeUnknownToNode Reason = "VolumeUnknownToNode"
	// ReasonStateNotKept: the node cannot write down which disk the volume is. Look at the space and
	// the rights of its state directory.
	ReasonStateNotKept Reason = "StateNotKept"
	// ReasonNodeToolFailed: mkfs, e2fsck, resize2fs or the kernel refused. The message has its
	// words.
	ReasonNodeToolFailed Reason = "NodeToolFailed"
	// ReasonInstanceUnknown: the driver does not know which instance it runs on.
	ReasonInstanceUnknown Reason = "InstanceUnknown"
)

// nodeCodes says which gRPC code goes with a reason. What is not here is INTERNAL.
var nodeCodes = map[Reason]codes.Code{
	ReasonDeviceNotFound:       codes.NotFound,
	ReasonDeviceNotUnique:      codes.FailedPrecondition,
	ReasonDeviceChanged:        codes.FailedPrecondition,
	ReasonDeviceWrongSize:      codes.FailedPrecondition,
	ReasonDeviceDiffers:        codes.FailedPrecondition,
	ReasonDeviceHeld:           codes.FailedPrecondition,
	ReasonDeviceReadOnly:       codes.FailedPrecondition,
	ReasonDeviceUnreadable:     codes.FailedPrecondition,
	ReasonDiskNameMissing:      codes.InvalidArgument,
	ReasonDiskNotBlank:         codes.FailedPrecondition,
	ReasonDiskSizeUnknown:      codes.FailedPrecondition,
	ReasonWrongFilesystem:      codes.FailedPrecondition,
	ReasonDeviceLocked:         codes.Aborted,
	ReasonUseDiffers:           codes.FailedPrecondition,
	ReasonDiskProofPending:     codes.Aborted,
	ReasonFilesystemDamaged:    codes.Internal,
	ReasonFilesystemTooLarge:   codes.FailedPrecondition,
	ReasonFilesystemNotGrown:   codes.FailedPrecondition,
	ReasonFilesystemFailed:     codes.FailedPrecondition,
	ReasonMkfsOptions:          codes.InvalidArgument,
	ReasonMountFlags:           codes.FailedPrecondition,
	ReasonStagedDifferently:    codes.AlreadyExists,
	ReasonNotStaged:            codes.FailedPrecondition,
	ReasonPublishedDifferently: codes.AlreadyExists,
	ReasonPublishedElsewhere:   codes.FailedPrecondition,
	ReasonStillMounted:         codes.Internal,
	ReasonTargetNotEmpty:       codes.Internal,
	ReasonPathInvalid:          codes.InvalidArgument,
	ReasonVolumeNotAtPath:      codes.NotFound,
	ReasonVolumeUnknownToNode:  codes.NotFound,
	ReasonStateNotKept:         codes.Internal,
	ReasonNodeToolFailed:       codes.Internal,
	ReasonInstanceUnknown:      codes.FailedPrecondition,
}

// refusal is an error with the reason a person can look up. The layers below the RPCs return it and
// know nothing of gRPC.
type refusal struct {
	reason Reason
	err    error
}

func (r *refusal) Error() string { return r.err.Error() }

func (r *refusal) Unwrap() error { return r.err }

// refuse makes a refusal; format may hold %w.
func refuse(reason Reason, format string, args ...any) error {
	return &refusal{reason: reason, err: fmt.Errorf(format, args...)}
}

// refusedFor says whether err is a refusal for that reason.
func refusedFor(err error, reason Reason) bool {
	var r *refusal
	return errors.As(err, &r) && r.reason == reason
}

// nodeError turns an error of the layers below into the status the CO sees.
func nodeError(err error) error {
	var r *refusal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &r):
		code, ok := nodeCodes[r.reason]
		if !ok {
			code = codes.Internal
		}
		return fail(code, r.reason, "%s", err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return fail(codes.DeadlineExceeded, ReasonDeadlineExceeded, "%s", err.Error())
	case errors.Is(err, context.Canceled):
		return fail(codes.Canceled, ReasonCanceled, "%s", err.Error())
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return fail(codes.Internal, ReasonNodeToolFailed, "%s", err.Error())
}
