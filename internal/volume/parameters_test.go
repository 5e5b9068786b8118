package volume

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestCV6ParseParameters(t *testing.T) {
	p, err := ParseParameters(map[string]string{
		"blockSize": "512", "diskType": "distributed", "imageId": strings.ToUpper(someID),
		"placement":                   "instance",
		"mkfsOptions":                 "reservedPercent=0,bytesPerInode=16384",
		"csi.storage.k8s.io/pvc/name": "claim",
		"csi.storage.k8s.io/node-expand-secret-namespace": "secrets",
	})
	must(t, err)
	if p.BlockSize != 512 || p.DiskType != diskTypeDistributed || p.ImageID != someID ||
		p.Placement != PlacementInstance ||
		p.MkfsOptions.String() != "bytesPerInode=16384,reservedPercent=0" {
		t.Errorf("got %+v", p)
	}
	p, err = ParseParameters(nil)
	if err != nil || p.DiskType != diskTypeDistributed || p.BlockSize != 0 ||
		p.Placement != placementRack || p.Largest() != MaxDistributedBytes {
		t.Errorf("without parameters: %+v, %v", p, err)
	}
	for _, values := range []map[string]string{{"diskType": "local"},
		{"diskType": "local", "blockSize": "4096"}} {
		if p, err = ParseParameters(values); err != nil || p.Largest() <= MaxDistributedBytes {
			t.Errorf("%v: a local disk has at most %d bytes, %v", values, p.Largest(), err)
		}
	}
}

func TestCV6BadParametersAreRefusedByName(t *testing.T) {
	for _, test := range []struct {
		key, value string
		reason     csierr.Reason
	}{
		{"blockSize", "1024", csierr.ParameterInvalid},
		{"blockSize", "", csierr.ParameterInvalid},
		{"blockSize", "4096 ", csierr.ParameterInvalid},
		{"blocksize", "4096", csierr.ParameterInvalid},
		{"diskType", "crucible", csierr.ParameterInvalid},
		{"diskType", "", csierr.ParameterInvalid},
		{"imageId", "ubuntu", csierr.ParameterInvalid},
		{"mkfsOptions", "-F", csierr.MkfsOptions},
		{"placement", "node", csierr.ParameterInvalid},
		{"placement", "", csierr.ParameterInvalid},
		{"colour", "blue", csierr.ParameterInvalid},
		{"csi.storage.k8s.io/fstpye", "xfs", csierr.ParameterInvalid},
		{"csi.storage.k8s.io/pvc", "x", csierr.ParameterInvalid},
		{"storage.kubernetes.io/whatever", "x", csierr.ParameterInvalid},
	} {
		_, err := ParseParameters(map[string]string{test.key: test.value})
		csitest.Want(t, err, codes.InvalidArgument, test.reason, test.key)
	}
	for unknown, nearest := range map[string]string{
		"csi.storage.k8s.io/fstpye":                    "csi.storage.k8s.io/fstype",
		"csi.storage.k8s.io/fsType2":                   "csi.storage.k8s.io/fstype",
		"csi.storage.k8s.io/node-publish-secrets-name": "csi.storage.k8s.io/node-publish-secret-name",
		"csi.storage.k8s.io/pv/names":                  "csi.storage.k8s.io/pv/name",
		"blocksize":                                    "blockSize",
		"mkfsOption":                                   "mkfsOptions",
		"imageID":                                      "imageId",
	} {
		_, err := ParseParameters(map[string]string{unknown: "x"})
		if err == nil || !strings.Contains(err.Error(), "nearest known one is "+nearest+"; ") {
			t.Errorf("%s: got %v, want the nearest to be %s", unknown, err, nearest)
		}
	}
	for _, values := range []map[string]string{
		{"diskType": "local", "blockSize": "512"},
		{"diskType": "local", "imageId": someID},
	} {
		_, err := ParseParameters(values)
		csitest.Want(t, err, codes.InvalidArgument, csierr.ParameterInvalid)
	}
}

func TestMkfsOptionsHaveToApplyToTheFilesystem(t *testing.T) {
	p, err := ParseParameters(map[string]string{"mkfsOptions": "bytesPerInode=16384"})
	must(t, err)
	if err := p.Fits([]*csi.VolumeCapability{csitest.Filesystem(""),
		csitest.Filesystem("ext3")}, GiB); err != nil {
		t.Error(err)
	}
	err = p.Fits([]*csi.VolumeCapability{csitest.Filesystem("ext4"), csitest.Filesystem("xfs")}, GiB)
	csitest.Want(t, err, codes.InvalidArgument, csierr.MkfsOptions)
}
