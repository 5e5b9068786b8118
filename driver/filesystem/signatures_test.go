//go:build linux

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
		regions := markerRegions(size)
		for _, s := range signatures() {
			offset := s.offset(size)
			if offset < 0 || offset+int64(len(s.Magic)) > size {
				continue
			}
			// Each signature is in one region, so it can be compared at once.
			i := slices.IndexFunc(regions, func(r region) bool {
				return r.Offset <= offset && offset+int64(len(s.Magic)) <= r.end()
			})
			if i < 0 {
				t.Errorf("size %d: %s at offset %d is not read whole", size, s.Name, offset)
				continue
			}
			data := make([]byte, regions[i].Bytes)
			copy(data[offset-regions[i].Offset:], s.Magic)
			v := scan{Path: "/dev/x", SizeBytes: size,
				Regions: []regionData{{regions[i], data}}}
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
