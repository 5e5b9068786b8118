package volume

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

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
