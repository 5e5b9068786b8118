//go:build linux

package filesystem

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// TestMkfsMakesWhatIsAcceptedForTheSize tries combinations of the options on disks of several
// sizes. What is refused for its size, mke2fs does not make either, or it fills the disk with
// inodes.
func TestMkfsMakesWhatIsAcceptedForTheSize(t *testing.T) {
	type format struct {
		fsType, options string
		size            int64
	}
	type option struct{ name, values string }
	ratio := option{"bytesPerInode", "1024 1025 1400 2048 2100 3000 4096 67108864"}
	inode := option{"inodeSize", "256 512 1024 2048"}
	block := option{"fsBlockSize", "1024 2048 4096"}
	var formats []format
	for _, c := range []struct {
		fsType  string
		gib     []int64
		options []option
	}{
		{volume.Ext4, []int64{1, 2, 3}, []option{ratio, inode, block}},
		// Small blocks make many groups, whose descriptors then need more than a group has.
		{volume.Ext4, []int64{720, 1023}, []option{{"bytesPerInode", "1024 2100"},
			{"inodeSize", "512 1024"}, block}},
		// mke2fs writes the whole inode tables of an ext3.
		{volume.Ext3, []int64{1, 2}, []option{ratio, inode, block}},
		{volume.XFS, []int64{1, 1023}, []option{inode, block, {"reflink", "true false"}}},
		{volume.Btrfs, []int64{1, 1023}, []option{{"nodeSize", "4096 8192 16384 32768 65536"},
			{"label", "abcdefghijkl"}}},
	} {
		combinations := []string{""}
		for _, o := range c.options {
			for _, others := range slices.Clone(combinations) {
				for value := range strings.FieldsSeq(o.values) {
					combinations = append(combinations,
						strings.TrimPrefix(others+","+o.name+"="+value, ","))
				}
			}
		}
		for _, options := range combinations {
			for _, gib := range c.gib {
				formats = append(formats, format{c.fsType, options, gib * guesttest.GiB})
			}
		}
	}
	accepted, refused := 0, 0
	for _, c := range short.Some(t, 60, formats) {
		o, err := volume.ParseMkfsOptions(c.options)
		csitest.Must(t, err)
		if o.Check(c.fsType, 0) != nil {
			continue
		}
		err = o.Check(c.fsType, c.size)
		file := guesttest.New(t).Sparse(c.size)
		v := Volume{FSType: c.fsType, Mkfs: o}
		name, args, failed := mkfsCommand(v)
		csitest.Must(t, failed)
		out, made := exec.Command(name, append(args, file)...).CombinedOutput()
		head := make([]byte, guesttest.MiB)
		disk, failed := os.Open(file)
		csitest.Must(t, failed)
		_, failed = disk.ReadAt(head, 0)
		csitest.Must(t, errors.Join(failed, disk.Close(), os.Remove(file)))
		number := func(name string, unset int) int {
			if n, err := strconv.Atoi(o.Value(name)); err == nil {
				return n
			}
			return unset
		}
		switch {
		case err == nil && made != nil:
			t.Errorf("%s with %q on %d GiB is accepted: %v: %s", c.fsType, c.options,
				c.size/guesttest.GiB, made, out)
		case err != nil && made == nil &&
			number("bytesPerInode", 16384) >= 2*number("inodeSize", 256):
			t.Errorf("%s with %q on %d GiB is refused, but mkfs makes it: %v", c.fsType, c.options,
				c.size/guesttest.GiB, err)
		case err == nil:
			accepted++
			wantNewFeatures(t, head, v)
		default:
			refused++
		}
	}
	t.Logf("%d accepted, %d refused", accepted, refused)
	if accepted == 0 || refused == 0 {
		t.Errorf("%d are accepted and %d refused", accepted, refused)
	}
}
