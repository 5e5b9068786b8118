package filesystem

import "github.com/oxidecomputer/oxide-csi-plugin/internal/volume"

// Volume is what Preparation needs to know about a volume.
type Volume struct {
	ID        string
	DiskName  string
	SizeBytes int64 // of the disk, from the controller; 0 if unknown
	ReadOnly  bool  // the disk itself is read-only
	FSType    string
	Mkfs      volume.MkfsOptions
	// Origin and the following come from the disk's ownership tag and are zero for a disk without one.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // the only filesystem to mount; empty for any
}

// neverRaw reports whether the controller vouches that no workload ever had the disk as a raw
// device.
func (v Volume) neverRaw() bool { return v.Use == volume.UseFilesystem }

// madeBlank reports whether the disk was created blank and never published as a raw device. Then a
// sample of its bytes can prove that it is still blank. Any other disk is read whole.
func (v Volume) madeBlank() bool { return v.Origin == volume.OriginBlank && v.neverRaw() }

// slots returns the offsets of the volume's records: those on a disk of that size and, if the disk
// was restored from the snapshot of a smaller one, those on the smaller one.
func (v Volume) slots(offsets func(int64) []int64, sizeBytes int64) []int64 {
	slots := offsets(sizeBytes)
	if v.Origin == volume.OriginSnapshot && v.SourceBytes > 0 && v.SourceBytes < sizeBytes {
		slots = append(slots, offsets(v.SourceBytes)...)
	}
	return slots
}

// makeUUID returns the UUID for a new filesystem of the volume: the expected one, else the volume's
// id. It is empty if the id is not a UUID, as for a static volume with a name of its own.
func (v Volume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := volume.ParseID(v.ID); ok {
		return id
	}
	return ""
}
