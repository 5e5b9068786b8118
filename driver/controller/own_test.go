package controller

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestE17ANameBelongsToOneCluster(t *testing.T) {
	disk := func(cluster, name string) *oxide.Disk {
		return &oxide.Disk{Name: oxide.Name(name), Description: volume.Tag{Name: "db",
			Cluster: cluster}.Description()}
	}
	for _, test := range []struct {
		name  string
		disk  *oxide.Disk
		words string // of the reason; empty: it belongs to the cluster blue
	}{
		{"the cluster's own", disk("blue", volume.DiskName("blue", "db")), ""},
		{"another cluster's of the same volume name", disk("red", volume.DiskName("red", "db")), `"red"`},
		{"one without a cluster", disk("", volume.DiskName("", "db")),
			`cluster "", and OXIDE_CLUSTER_ID is "blue"`},
		{"a name of the hash of \"db\" alone", disk("blue", "csi-ffe2bkb99rso8u1a"), "another name"},
		{"a tag of ours on another cluster's name", disk("blue", volume.DiskName("red", "db")),
			"another name"},
		{"a tag of ours on a name without a cluster", disk("blue", volume.DiskName("", "db")),
			"another name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if why := rack.ForeignDisk(test.disk, "blue"); (why == "") != (test.words == "") ||
				!strings.Contains(why, test.words) {
				t.Errorf("ForeignDisk returned %q, want %q", why, test.words)
			}
			// An audit owns and deletes only what its own cluster made.
			snapshot := &oxide.Snapshot{Name: test.disk.Name, Description: test.disk.Description}
			if why := rack.ForeignSnapshot(snapshot, "blue"); (why == "") != (test.words == "") {
				t.Errorf("ForeignSnapshot returned %q, want %q", why, test.words)
			}
		})
	}
}
