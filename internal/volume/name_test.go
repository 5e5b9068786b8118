package volume

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestE17TheNameOfADiskIsTheHashOfItsVolume(t *testing.T) {
	for csiName, want := range map[string]string{
		"pvc-6fa1d3ac-1234-4a5b-8c6d-7e8f9a0b1c2d": "csi-hpcv1i4tn2rop6ah",
		"日本/ü\t": "csi-1gi5nnadptjaev48",
	} {
		if got := DiskName("blue", csiName); got != want {
			t.Errorf("diskName(blue, %q) = %q, want %q", csiName, got, want)
		}
	}
}

func TestE17EveryNameIsOneTheRackTakes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Short ones, so that some are equal, and ends of one are the beginning of the other.
		short := rapid.StringOfN(rapid.SampledFrom([]rune("ab-.ü")), 0, 3, -1)
		a, b := short.Draw(t, "a"), short.Draw(t, "b")
		one, other := short.Draw(t, "cluster of a"), short.Draw(t, "cluster of b")
		name := DiskName(one, a)
		if len(name) != 20 || !IsOwnName(name) || !RackName.MatchString(name) {
			t.Fatalf("diskName(%q, %q) = %q", one, a, name)
		}
		if again := DiskName(other, b); (a == b && one == other) != (name == again) {
			t.Fatalf("%q of %q and %q of %q have the names %q and %q", a, one, b, other, name, again)
		}
	})
}

func TestIsOwnName(t *testing.T) {
	for _, name := range []string{"", "csi-", "csi-0123456789abcde", "csi-0123456789abcdef0",
		"csi-0123456789abcdeF", "csi-0123456789abcdez", "pvc-0123456789abcdef",
		"csi-0123456789abc-ef"} {
		if IsOwnName(name) {
			t.Errorf("isOwnName(%q)", name)
		}
	}
}

func TestANameHasAtMost128Bytes(t *testing.T) { // B-1
	for length, want := range map[int]bool{128: true, 129: false} {
		if err := CheckName(strings.Repeat("x", length)); (err == nil) != want {
			t.Errorf("a name of %d bytes: %v", length, err)
		}
	}
}

const someID = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01"

func TestDiskSerial(t *testing.T) {
	for in, want := range map[string]string{
		"db": "db", "csi-0123456789abcdef": "csi-0123456789abcdef",
		"csi-0123456789abcdef-more": "csi-0123456789abcdef",
	} {
		if got := Serial(in); got != want {
			t.Errorf("Serial(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestMessagesShowSizesAndObjectsTwice(t *testing.T) {
	for _, test := range []struct{ got, want string }{
		{SizeText(10 * GiB), "10 GiB (10737418240 bytes)"},
		{SizeText(GiB + GiB/2), "1.50 GiB (1610612736 bytes)"},
		{SizeText(512), "512 bytes"},
		{NameAndID("db", someID), "db (" + someID + ")"},
		{NameAndID("", someID), someID},
		{NameAndID("db", ""), "db"},
	} {
		if test.got != test.want {
			t.Errorf("got %q, want %q", test.got, test.want)
		}
	}
}
