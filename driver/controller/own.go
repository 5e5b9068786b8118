package controller

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// useProblem returns why a disk does not fit these capabilities, or "". A disk that workloads write
// as a raw device could later look blank, or like one of the driver's filesystems. So the use of a
// disk holds in every cluster: the one that made it formats it by a sample.
func useProblem(d *oxide.Disk, wanted ...*csi.VolumeCapability) string {
	m, ok := rack.DiskTag(d)
	if use := useOf(wanted); !ok || m.Use == "" || m.Use == volume.UseBoth || m.Use == use {
		return ""
	}
	words := map[string]string{volume.UseFilesystem: "filesystems (mount)", volume.UseBlock: "raw " +
		"access (block)"}
	return fmt.Sprintf("the volume of the disk %s was created for %s only; create one with the "+
		"access type that the workload needs, and copy the data", rack.DiskText(d), words[m.Use])
}

// checkOwnDisk refuses a disk that this driver did not make, such as a boot disk that somebody
// wrote into a PersistentVolume. The driver deletes only what it made.
func checkOwnDisk(d *oxide.Disk, cluster string) error {
	return notOurs("disk", rack.DiskText(d), rack.ForeignDisk(d, cluster), "volume the reclaim policy")
}

func checkOwnSnapshot(s *oxide.Snapshot, cluster string) error {
	return notOurs("snapshot", rack.SnapshotText(s), rack.ForeignSnapshot(s, cluster),
		"VolumeSnapshotContent the deletionPolicy")
}

func notOurs(kind, text, why, policy string) error {
	if why == "" {
		return nil
	}
	return csierr.New(csierr.DiskNotOurs, "the %s %s %s; the driver deletes only what it made: give "+
		"the %s Retain, and delete the %s by hand on the rack", kind, text, why, policy, kind)
}
