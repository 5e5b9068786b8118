package conformance

import (
	"io"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// shortLived is a device that can be read some times, and then has no bytes any more.
type shortLived struct{ reads int }

func (d *shortLived) ReadAt(p []byte, _ int64) (int, error) {
	if d.reads--; d.reads < 0 {
		return 0, io.EOF
	}
	return len(p), nil
}

func TestADeviceThatWasReadToItsEndIsNotGone(t *testing.T) {
	for reads, want := range map[int]bool{1: true, 2: false} {
		last, gone := readUntilGone(&shortLived{reads}, harness.MiB/2, time.Now())
		if gone != want || last == 0 {
			t.Errorf("after %d of 2 reads: gone is %t after %s, want %t", reads, gone, last, want)
		}
	}
}
