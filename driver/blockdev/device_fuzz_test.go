//go:build linux

package blockdev

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// FuzzParseSerial checks that a serial is the bytes between the padding: parsing removes all of the
// padding and nothing else, and more padding does not change the result.
func FuzzParseSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		s := parseSerial(b)
		if s != strings.Trim(s, "\x00 \t\n") || !bytes.Contains(b, []byte(s)) {
			t.Fatalf("parseSerial(%q) = %q", b, s)
		}
		if rest := bytes.Replace(b, []byte(s), nil, 1); len(bytes.Trim(rest, "\x00 \t\n")) > 0 {
			t.Fatalf("parseSerial(%q) = %q, which omits %q", b, s, rest)
		}
		for _, padded := range []string{s + "\n", s + "\x00\x00\x00\n", s + "   \n", " " + s} {
			if again := parseSerial([]byte(padded)); again != s {
				t.Fatalf("parseSerial(%q) = %q, want %q", padded, again, s)
			}
		}
	})
}

// FuzzDiskSerial checks that two disks have the same serial only if their names begin with the same
// 20 bytes, and that parseSerial returns it from the bytes that the kernel shows.
func FuzzDiskSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, a, b string) {
		one, other := volume.Serial(a), volume.Serial(b)
		if !strings.HasPrefix(a, one) || len(one) != min(len(a), 20) {
			t.Fatalf("Serial(%q) = %q", a, one)
		}
		same := (a + strings.Repeat("\x00", 20))[:20] == (b + strings.Repeat("\x00", 20))[:20]
		if one == other && !same {
			t.Fatalf("%q and %q both have the serial %q", a, b, one)
		}
		var field [20]byte // as the rack pads it
		copy(field[:], a)
		if volume.RackName.MatchString(a) {
			if seen := parseSerial(append(field[:], '\n')); seen != one {
				t.Fatalf("the disk %q has the serial %q, want %q", a, seen, one)
			}
		}
	})
}

// FuzzParseNumber checks that ParseNumber accepts only major:minor and returns these two numbers.
func FuzzParseNumber(f *testing.F) {
	form := regexp.MustCompile(`^\s*\+?0*(\d+):\+?0*(\d+)\s*$`)
	f.Fuzz(func(t *testing.T, b []byte) {
		major, minor, err := ParseNumber(b)
		if err != nil {
			return
		}
		want := form.FindSubmatch(b)
		number := Device{Major: major, Minor: minor}.Number()
		if want == nil || string(want[1])+":"+string(want[2]) != number {
			t.Fatalf("ParseNumber(%q) = %s", b, number)
		}
	})
}
