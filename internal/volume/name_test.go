package volume

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestDiskNameIsAHashOfClusterAndName(t *testing.T) { // E-17
	for csiName, want := range map[string]string{
		"pvc-6fa1d3ac-1234-4a5b-8c6d-7e8f9a0b1c2d": "csi-hpcv1i4tn2rop6ah",
		"日本/ü\t": "csi-1gi5nnadptjaev48",
	} {
		if got := DiskName("blue", csiName); got != want {
			t.Errorf("diskName(blue, %q) = %q, want %q", csiName, got, want)
		}
	}
}

func TestDiskNamesAreValidAndUnique(t *testing.T) { // E-17
	rapid.Check(t, func(t *rapid.T) {
		// Short names are often equal, or the end of one is the beginning of the other.
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

func TestIsOwnNameRejectsNamesOfAnotherForm(t *testing.T) {
	for _, name := range []string{"", "csi-", "csi-0123456789abcde", "csi-0123456789abcdef0",
		"csi-0123456789abcdeF", "csi-0123456789abcdez", "pvc-0123456789abcdef",
		"csi-0123456789abc-ef"} {
		if IsOwnName(name) {
			t.Errorf("isOwnName(%q)", name)
		}
	}
}

func TestCheckNameAcceptsAtMost128Bytes(t *testing.T) { // B-1
	for length, want := range map[int]bool{128: true, 129: false} {
		if err := CheckName(strings.Repeat("x", length)); (err == nil) != want {
			t.Errorf("a name of %d bytes: %v", length, err)
		}
	}
}

const someID = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01"

func TestMessagesShowSizesWithBytesAndNamesWithIDs(t *testing.T) {
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

// legalTags draws tags of valid requests. JSON escapes make many of their names much longer.
func legalTags(t *rapid.T) (tag Tag, csiName string) {
	some := rapid.SampledFrom([]rune("\t\n\r\"\\<>&\u2028\u2029ü日😀a"))
	legal := rapid.OneOf(rapid.StringOfN(some, 1, 128, 128), rapid.StringN(1, 128, 128),
		rapid.Map(some, func(r rune) string { return strings.Repeat(string(r), 128/utf8.RuneLen(r)) })).
		Filter(func(name string) bool {
			return !strings.ContainsFunc(name, func(r rune) bool {
				return unicode.IsControl(r) && !strings.ContainsRune("\t\n\r", r)
			})
		})
	cluster := rapid.StringMatching(`([A-Za-z0-9][-A-Za-z0-9._]{61}[A-Za-z0-9])?`)
	uuid := rapid.SampledFrom([]string{"", someID})
	tag = Tag{
		Name: legal.Draw(t, "name"), Cluster: cluster.Draw(t, "cluster"),
		MkfsOptions: rapid.SampledFrom([]string{"", longestOptions}).Draw(t, "options"),
		BlockSize:   rapid.SampledFrom(append(BlockSizes, 0)).Draw(t, "block size"),
		Origin: rapid.SampledFrom([]string{"", OriginBlank, OriginSnapshot,
			OriginImage}).Draw(t, "origin"),
		Use: rapid.SampledFrom([]string{"", UseFilesystem, UseBlock, UseBoth}).Draw(t, "use"),
		SourceBytes: rapid.SampledFrom([]int64{0, GiB, MaxDistributedBytes,
			1 << 62}).Draw(t, "source"),
		FilesystemUUID: uuid.Draw(t, "filesystem"),
		Claim:          rapid.OneOf(rapid.Just(""), rapid.Just(longestClaim), legal).Draw(t, "claim"),
	}
	return tag, tag.Name
}

// longestOptions has all mkfs options, more than any one filesystem accepts.
const longestOptions = "bytesPerInode=67108864,fsBlockSize=4096,inodeSize=2048," +
	"label=abcdefghijkl,nodeSize=65536,reflink=false,reservedPercent=50"

// longestClaim has the longest namespace and name that Kubernetes allows.
var longestClaim = strings.Repeat("n", 63) + "/" + strings.Repeat("c", 253)

func TestDescriptionsAreShortenedToTheRacksLimit(t *testing.T) {
	o, err := ParseMkfsOptions(longestOptions)
	if err != nil || o.String() != longestOptions || len(o.chosen) != len(mkfsRules) {
		t.Fatalf("the longest options are %q, %v", o, err)
	}
	rapid.Check(t, func(t *rapid.T) {
		tag, name := legalTags(t)
		text := tag.Description()
		got, ok := ParseTag(text)
		if err := CheckName(name); err != nil {
			t.Fatalf("%q is refused: %v", name, err)
		}
		if len(text) > 512 || !utf8.ValidString(text) || !ok {
			t.Fatalf("%q has %d bytes, %t", text, len(text), ok)
		}
		if !got.IsOf(tag.Cluster, name) || !got.Names(DiskName(tag.Cluster, name)) {
			t.Fatalf("%+v is not of %q", got, name)
		}
		for _, other := range []string{name + "x", name[:len(name)-1], got.Name + "…"} {
			if got.IsOf(tag.Cluster, other) || got.Names(DiskName(tag.Cluster, other)) {
				t.Fatalf("%+v is of %q", got, other)
			}
		}
		if got.IsOf(tag.Cluster+"x", name) {
			t.Fatalf("%+v is of another cluster", got)
		}
		if beginning, cut := strings.CutSuffix(got.Claim, "…"); got.Claim != tag.Claim &&
			(len(text) < 512-25 && tag.Claim != "" || got.Claim != "" && !cut ||
				!strings.HasPrefix(tag.Claim, beginning)) {
			t.Fatalf("of the claim %q %q is kept, in %d bytes", tag.Claim, got.Claim, len(text))
		}
		if got.RackName != "" && got.Claim != "" {
			t.Fatalf("%q has a label, but not the whole name", text)
		}
		got.Claim = tag.Claim
		if got.RackName == "" && got != tag {
			t.Fatalf("%+v became %+v", tag, got)
		}
		if got.RackName != "" && (len(text) < 512-6 || !strings.HasPrefix(name, got.Name)) {
			t.Fatalf("of %q only %q is kept, in %d bytes", name, got.Name, len(text))
		}
		got.Name, got.RackName = tag.Name, ""
		if got != tag {
			t.Fatalf("besides the name, %+v became %+v", tag, got)
		}
	})
}

func TestDescriptionsEscapeOnlyWhatJSONDemands(t *testing.T) {
	want := `csi.oxide.computer {"name":"a<b>&ü\"\\\n","cluster":"blue"}`
	tag := Tag{Name: "a<b>&ü\"\\\n", Cluster: "blue"}
	if got := tag.Description(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestParseTagAcceptsTagsOfEarlierVersions(t *testing.T) {
	for name, c := range map[string]struct{ description, csiName string }{
		"with everything escaped": {`csi.oxide.computer {"name":"a\u003cb\u003e\u0026",` +
			`"cluster":"blue","origin":"blank","use":"filesystem"}`, "a<b>&"},
		"without use and origin": {`csi.oxide.computer {"name":"db","cluster":"blue"}`, "db"},
	} {
		tag, ok := ParseTag(c.description)
		if !ok || !tag.IsOf("blue", c.csiName) || !tag.Names(DiskName("blue", c.csiName)) ||
			tag.Names(DiskName("red", c.csiName)) || tag.IsOf("red", c.csiName) {
			t.Errorf("%s: %s is %+v, %t", name, c.description, tag, ok)
		}
	}
	if tag := (Tag{Name: "db", RackName: "csi-0000000000000000"}); tag.Names(DiskName("", "db")) {
		t.Errorf("a name that was cut is taken for a whole one")
	}
}

// FuzzRackID checks that ParseID accepts only UUIDs: the rack treats any other id as a name.
func FuzzRackID(f *testing.F) {
	f.Add("")
	f.Fuzz(func(t *testing.T, id string) {
		got, ok := ParseID(id)
		if want := csitest.UUID.MatchString(strings.ToLower(id)) && len(id) == 36; ok != want {
			t.Fatalf("rackID(%q) = %q, %t", id, got, ok)
		}
		if ok && got != strings.ToLower(id) {
			t.Fatalf("rackID(%q) = %q", id, got)
		}
		if IsID(id) != csitest.UUID.MatchString(id) {
			t.Fatalf("isRackID(%q) = %t", id, IsID(id))
		}
	})
}

// FuzzDescription checks that ParseTag accepts only what the driver could have written.
func FuzzDescription(f *testing.F) {
	f.Add(DriverName + `.evil {"name":"x"}`)
	f.Fuzz(func(t *testing.T, description string) {
		m, ok := ParseTag(description)
		if !ok {
			if m != (Tag{}) {
				t.Fatalf("%q is no tag, and yet %+v", description, m)
			}
			return
		}
		text, prefixed := strings.CutPrefix(description, DriverName+" ")
		if !prefixed || m.Name == "" || !json.Valid([]byte(text)) {
			t.Fatalf("%q is the tag %+v", description, m)
		}
		again, ok := ParseTag(m.Description())
		if m.RackName == "" {
			again.Name, again.RackName = m.Name, "" // the name in a long description is truncated
		}
		again.Claim = m.Claim // the claim is truncated before the name
		if !ok || again != m {
			t.Fatalf("%q is the tag %+v, then %+v", description, m, again)
		}
	})
}
