package blockdev

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// FuzzParseSerial holds that a serial is the bytes between the padding: nothing is lost from it,
// nothing of the padding is left, and padding more changes nothing.
func FuzzParseSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		s := parseSerial(b)
		if s != strings.Trim(s, "\x00 \t\n") || !bytes.Contains(b, []byte(s)) {
			t.Fatalf("parseSerial(%q) = %q", b, s)
		}
		if rest := bytes.Replace(b, []byte(s), nil, 1); len(bytes.Trim(rest, "\x00 \t\n")) > 0 {
			t.Fatalf("parseSerial(%q) = %q, which leaves out %q", b, s, rest)
		}
		for _, padded := range []string{s + "\n", s + "\x00\x00\x00\n", s + "   \n", " " + s} {
			if again := parseSerial([]byte(padded)); again != s {
				t.Fatalf("parseSerial(%q) = %q, want %q", padded, again, s)
			}
		}
	})
}

// FuzzDiskSerial holds that two disks show one serial only when their names begin with the same 20
// bytes, and that the serial comes back from what the kernel makes of it.
func FuzzDiskSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, a, b string) {
		one, other := volume.Serial(a), volume.Serial(b)
		if !strings.HasPrefix(a, one) || len(one) != min(len(a), 20) {
			t.Fatalf("diskSerial(%q) = %q", a, one)
		}
		same := (a + strings.Repeat("\x00", 20))[:20] == (b + strings.Repeat("\x00", 20))[:20]
		if one == other && !same {
			t.Fatalf("%q and %q both show the serial %q", a, b, one)
		}
		var field [20]byte // as the rack fills it
		copy(field[:], a)
		if volume.RackName.MatchString(a) {
			if seen := parseSerial(append(field[:], '\n')); seen != one {
				t.Fatalf("the disk %q shows %q, not %q", a, seen, one)
			}
		}
	})
}

// FuzzParseDeviceNumber holds that a number is read only from two numbers, and as what it says.
func FuzzParseDeviceNumber(f *testing.F) {
	form := regexp.MustCompile(`^\s*\+?0*(\d+):\+?0*(\d+)\s*$`)
	f.Fuzz(func(t *testing.T, b []byte) {
		major, minor, err := ParseNumber(b)
		if err != nil {
			return
		}
		says := form.FindSubmatch(b)
		number := Device{Major: major, Minor: minor}.Number()
		if says == nil || string(says[1])+":"+string(says[2]) != number {
			t.Fatalf("parseDeviceNumber(%q) = %s", b, number)
		}
	})
}
