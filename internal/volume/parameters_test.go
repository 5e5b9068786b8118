package volume

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestParseParameters(t *testing.T) { // CV-6
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

func TestBadParametersAreRefusedByName(t *testing.T) { // CV-6
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

type chartParameters struct {
	Parameters     []string
	DiskType       []DiskType
	BlockSize      []int
	LocalBlockSize int
	Placement      []Placement
	Filesystems    []string
	MkfsOptions    map[string]struct {
		Filesystems []string
		Valid       string
		Range       []int
		Values      []string
		Pattern     string
	}
}

func TestTheChartKnowsTheParametersOfTheDriver(t *testing.T) {
	text, err := os.ReadFile("../../deploy/chart/parameters.yaml")
	must(t, err)
	var chart chartParameters
	must(t, yaml.UnmarshalStrict(text, &chart))
	for what, pair := range map[string][2]any{
		"parameters":       {parameterNames, chart.Parameters},
		"disk types":       {[]DiskType{diskTypeDistributed, DiskTypeLocal}, chart.DiskType},
		"block sizes":      {BlockSizes, chart.BlockSize},
		"local block size": {localBlockSize, chart.LocalBlockSize},
		"placements":       {placements, chart.Placement},
		"filesystems":      {Filesystems, chart.Filesystems},
		"mkfs options": {slices.Sorted(maps.Keys(mkfsRules)),
			slices.Sorted(maps.Keys(chart.MkfsOptions))},
	} {
		if diff := cmp.Diff(pair[0], pair[1]); diff != "" {
			t.Errorf("%s differ (-driver +chart):\n%s", what, diff)
		}
	}
	for name, option := range chart.MkfsOptions {
		rule := mkfsRules[name]
		if diff := cmp.Diff(slices.Sorted(maps.Keys(rule.args)), option.Filesystems); diff != "" {
			t.Errorf("the filesystems of %s differ (-driver +chart):\n%s", name, diff)
		}
		if rule.valid.Words != option.Valid {
			t.Errorf("%s is %q in the driver and %q in the chart", name, rule.valid.Words, option.Valid)
		}
		if option.Pattern != "" {
			if option.Pattern != mkfsLabel.String() {
				t.Errorf("%s matches %s in the driver and %s in the chart", name, mkfsLabel, option.Pattern)
			}
			continue
		}
		for _, value := range mkfsValues(option.Range) {
			accepted := slices.Contains(option.Values, value)
			if n, err := strconv.Atoi(value); len(option.Range) == 2 && err == nil {
				accepted = n >= option.Range[0] && n <= option.Range[1]
			}
			if rule.valid.Contains != nil && rule.valid.Contains(value) != accepted {
				t.Errorf("%s=%s: the driver accepts it %v, the chart %v", name, value, !accepted, accepted)
			}
		}
	}
}

// mkfsValues are values of any option, and those at the ends of a range.
func mkfsValues(ends []int) []string {
	values := []string{"", "true", "false", "yes"}
	for n := range 20 {
		values = append(values, strconv.Itoa(1<<n), strconv.Itoa(n))
	}
	for _, end := range ends {
		values = append(values, strconv.Itoa(end-1), strconv.Itoa(end), strconv.Itoa(end+1))
	}
	return values
}

func TestMkfsOptions(t *testing.T) {
	for _, c := range []struct {
		text, fsType string
		want         []string
		says         string // what the error has; empty means none
	}{
		{"", Ext4, nil, ""},
		{"bytesPerInode=16384, reservedPercent=0", Ext4, []string{"-i", "16384", "-m", "0"}, ""},
		{"inodeSize=512,fsBlockSize=1024", Ext3, []string{"-I", "512", "-b", "1024"}, ""},
		{"reflink=true,inodeSize=512,fsBlockSize=4096", XFS,
			[]string{"-m", "reflink=1", "-i", "size=512", "-b", "size=4096"}, ""},
		{"reflink=false", XFS, []string{"-m", "reflink=0"}, ""},
		{"nodeSize=16384,label=my-data_1.0", Btrfs, []string{"-n", "16384", "-L", "my-data_1.0"}, ""},
		{"reflink=true", Ext4, nil, "does not apply to ext4; allowed are bytesPerInode"},
		{"bytesPerInode=16384", XFS, nil, "does not apply to xfs"},
		{"inodeSize=4096", Ext4, nil, "has to be 256, 512"},
		{"inodeSize=2048,fsBlockSize=1024", Ext4, nil, "more than fsBlockSize"},
		{"inodeSize=256", XFS, nil, "xfs takes 512"},
		{"inodeSize=2048,fsBlockSize=4096", XFS, []string{"-i", "size=2048", "-b", "size=4096"}, ""},
		{"inodeSize=1024,fsBlockSize=1024", XFS, nil, "half of its block size"},
		{"bytesPerInode=2048,inodeSize=1024", Ext4, []string{"-i", "2048", "-I", "1024"}, ""},
		{"bytesPerInode=2048,inodeSize=2048", Ext4, nil, "at least twice inodeSize"},
		{"bytesPerInode=2100,inodeSize=2048", Ext3, nil, "at least twice inodeSize"},
		{"bytesPerInode=+16384", Ext4, nil, "1024 to 67108864"},
		{"bytesPerInode=016384", Ext4, nil, "1024 to 67108864"},
		{"reservedPercent=51", Ext4, nil, "0 to 50"},
		{"label=a b", Ext4, nil, "label has to be"},
		{"label=", Ext4, nil, "label has to be"},
		{"label", Ext4, nil, "label has to be"},
		{"label=a,label=b", Ext4, nil, "twice"},
		{"-F", Ext4, nil, "allowed are bytesPerInode, fsBlockSize, inodeSize, label"},
		{"force=true", XFS, nil, "is not allowed"},
		{"label=a,", Ext4, nil, "is not allowed"},
		{"=1", Ext4, nil, "is not allowed"},
	} {
		t.Run("options "+c.text+" for "+c.fsType, func(t *testing.T) {
			o, err := ParseMkfsOptions(c.text)
			if err == nil {
				err = o.Check(c.fsType, GiB)
			}
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Fatalf("error %v does not say %q", err, c.says)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(c.want, o.Args(c.fsType)); diff != "" {
				t.Fatal(diff)
			}
		})
	}
}
