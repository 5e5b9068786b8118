package filesystem

import (
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
)

func TestEverySignatureIsReadAndFound(t *testing.T) {
	for _, size := range []int64{64 * guesttest.MiB, guesttest.GiB, 3*guesttest.GiB + 8*guesttest.MiB,
		100*guesttest.GiB - 512, 1023 * guesttest.GiB} {
		areas := markerRegions(size)
		for _, s := range signatures {
			offset := s.offset(size)
			if offset < 0 || offset+int64(len(s.Magic)) > size {
				continue
			}
			// Signatures lie in one area each, so what was read can be compared at once.
			i := slices.IndexFunc(areas, func(a region) bool {
				return a.Offset <= offset && offset+int64(len(s.Magic)) <= a.end()
			})
			if i < 0 {
				t.Errorf("size %d: %s at offset %d is not read whole", size, s.Name, offset)
				continue
			}
			data := make([]byte, areas[i].Bytes)
			copy(data[offset-areas[i].Offset:], s.Magic)
			v := scan{Path: "/dev/x", Strange: -1, SizeBytes: size, Regions: []regionData{{areas[i], data}}}
			found := findSignatures(size, v.at)
			if !slices.ContainsFunc(found, func(f finding) bool {
				return f.Name == s.Name && f.Offset == offset && f.Sure == (len(s.Magic) >= sureBytes)
			}) {
				t.Errorf("size %d: %s at offset %d is not found: %v", size, s.Name, offset, found)
			}
			if err := v.checkBlank(); err == nil || !strings.Contains(err.Error(), "at offset") {
				t.Errorf("size %d: a disk with %s: %v", size, s.Name, err)
			}
		}
	}
}
