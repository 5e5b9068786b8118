//go:build linux

package filesystem

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func covered(regions []region, offset int64) bool {
	return slices.ContainsFunc(regions, func(r region) bool {
		return r.Offset <= offset && offset < r.end()
	})
}

var testSizes = []int64{512, 64 << 10, guesttest.MiB, 3 * guesttest.MiB, 8 * guesttest.MiB,
	64*guesttest.MiB + 512, 300*guesttest.MiB + 4096, guesttest.GiB,
	3*guesttest.GiB + 8*guesttest.MiB, 10 * guesttest.GiB, 100*guesttest.GiB - 512,
	1023 * guesttest.GiB, 5 << 40}

func TestMarkerRegions(t *testing.T) {
	for _, size := range testSizes {
		regions := markerRegions(size)
		var bytes int64
		for i, r := range regions {
			bytes += r.Bytes
			last := r.end() == size
			if r.Owner == "" || r.Offset < 0 || r.Bytes <= 0 || r.end() > size ||
				r.Offset%sectorBytes != 0 || (!last && r.Bytes%sectorBytes != 0) {
				t.Errorf("size %d: region %+v", size, r)
			}
			if slices.ContainsFunc(regions[:i], func(other region) bool {
				return other.Offset <= r.Offset && r.end() <= other.end()
			}) {
				t.Errorf("size %d: region %+v is read twice", size, r)
			}
		}
		if bytes > 8*guesttest.MiB || len(regions) > 600 {
			t.Errorf("size %d: %d bytes in %d regions are too many", size, bytes, len(regions))
		}
		for _, offset := range []int64{0, size / 2, size - 1, min(size, guesttest.MiB) - 1,
			max(0, size-2*guesttest.MiB), max(0, size-3087*512)} {
			// The middle is read for xfs.
			if !covered(regions, offset) && (offset != size/2 || size < 128*guesttest.MiB) {
				t.Errorf("size %d: offset %d is not read", size, offset)
			}
		}
		for _, slot := range RecordOffsets(size) {
			if slot < 0 || slot%sectorBytes != 0 || slot+sectorBytes > size ||
				!covered(ownRegions(size), slot) {
				t.Errorf("size %d: a record at %d", size, slot)
			}
		}
		if n := len(RecordOffsets(size)); n != 3 && size >= guesttest.MiB {
			t.Errorf("size %d has %d offsets for records", size, n)
		}
	}
}

// TestEverySuperblockCopyIsInARegion asks the filesystems' tools where the copies are.
func TestEverySuperblockCopyIsInARegion(t *testing.T) {
	numbers := func(t *testing.T, out, pattern string) []int64 {
		t.Helper()
		var all []int64
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(out, -1) {
			n, err := strconv.ParseInt(m[1], 10, 64)
			csitest.Must(t, err)
			all = append(all, n)
		}
		return all
	}
	type format struct {
		size, block int64
		features    string   // of an ext
		args        []string // of mkfs.xfs
	}
	var exts, xfses []format
	for _, size := range []int64{64 * guesttest.MiB, guesttest.GiB, 3*guesttest.GiB + 8*guesttest.MiB,
		10 * guesttest.GiB} {
		for _, block := range []int64{1024, 2048, 4096, 65536} {
			for _, features := range []string{"sparse_super", "sparse_super2", "meta_bg,^resize_inode"} {
				exts = append(exts, format{size: size, block: block, features: features})
			}
		}
		layouts := [][]string{nil, {"-d", "agcount=8"}, {"-b", "size=1024"}, {"-d", "agcount=16"}}
		if size < 3*guesttest.GiB {
			layouts = layouts[:3] // with more groups there is no room for a log
		}
		for _, args := range layouts {
			if size >= 300*guesttest.MiB {
				xfses = append(xfses, format{size: size, args: args})
			}
		}
	}
	for _, c := range short.Some(t, 8, exts) {
		t.Run(fmt.Sprintf("ext4 with blocks of %d and %s on %d MiB", c.block, c.features,
			c.size/guesttest.MiB), func(t *testing.T) {
			file := guesttest.New(t).Sparse(c.size)
			guesttest.Run(t, "mke2fs", "-q", "-F", "-t", "ext4", "-b", fmt.Sprint(c.block), "-O",
				c.features, file)
			copies := numbers(t, guesttest.Run(t, "dumpe2fs", file), `Backup superblock at (\d+)`)
			for _, n := range copies {
				if !covered(markerRegions(c.size), n*c.block) {
					t.Errorf("the copy in block %d of %d bytes is not read", n, c.block)
				}
			}
			if len(copies) == 0 && c.size > 8*c.block*c.block {
				t.Error("it has no copies")
			}
		})
	}
	for _, c := range short.Some(t, 3, xfses) {
		t.Run(fmt.Sprintf("xfs on %d MiB with %q", c.size/guesttest.MiB, c.args), func(t *testing.T) {
			file := guesttest.New(t).Sparse(c.size)
			guesttest.Run(t, "mkfs.xfs", append(append([]string{"-q"}, c.args...), file)...)
			out := guesttest.Run(t, "xfs_db", "-r", "-c", "sb 0", "-c", "p agcount agblocks blocksize", file)
			n := numbers(t, out, ` = (\d+)`)
			for group := range n[0] {
				if !covered(markerRegions(c.size), group*n[1]*n[2]) {
					t.Errorf("the superblock of group %d of %d is not read", group, n[0])
				}
			}
		})
	}
}
