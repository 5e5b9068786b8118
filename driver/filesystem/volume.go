package filesystem

import "github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

// Volume is what has to be known of a volume to make its filesystem ready.
type Volume struct {
	ID        string
	DiskName  string
	SizeBytes int64 // of the disk, from the controller; 0 when it did not say
	ReadOnly  bool  // the disk itself can only be read
	FSType    string
	Mkfs      volume.MkfsOptions
	// What the controller read from the disk's ownership tag; all empty for a disk without one.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // the only filesystem to mount; empty if any will do
}

// madeBlank reports whether the disk was made blank and never shown to a workload as a raw device.
// Then a sample of its bytes can prove that it is still blank; any other disk is read whole.
func (v Volume) madeBlank() bool {
	return v.Origin == volume.OriginBlank && v.Use == volume.UseFilesystem
}

// makeUUID returns the UUID that the volume's filesystem is made with: the one that is expected,
// else the volume's id; empty if that is none, as of a static volume with a name of its own.
func (v Volume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := volume.ParseID(v.ID); ok {
		return id
	}
	return ""
}

// blankFrom is where the part of the volume's disk begins that the rack made blank behind a smaller
// snapshot, and that nobody has been shown as a raw device. Without one it is the disk's end.
func (v Volume) blankFrom(sizeBytes int64) int64 {
	if v.Origin != volume.OriginSnapshot || v.Use != volume.UseFilesystem || v.SourceBytes <= 0 ||
		v.SourceBytes%sectorBytes != 0 {
		return sizeBytes
	}
	return min(v.SourceBytes, sizeBytes)
}
