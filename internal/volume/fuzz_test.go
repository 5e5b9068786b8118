package volume

import (
	"encoding/json"
	"maps"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// FuzzRackID checks that only UUIDs in the rack's form reach the rack, because it would treat any
// other id as a name.
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

// FuzzDescription checks that a disk belongs to the driver only if the driver could have written
// its description.
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
		again.Claim = m.Claim // and the claim even before
		if !ok || again != m {
			t.Fatalf("%q is the tag %+v, then %+v", description, m, again)
		}
	})
}

// FuzzParameters checks that accepted parameters describe a disk that a rack can make, that no
// unknown parameter is ignored, and that the keys that a CO adds for itself have no effect.
func FuzzParameters(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		values := csitest.Pairs(text)
		p, err := ParseParameters(values)
		if err != nil {
			csitest.Presentable(t, err, codes.InvalidArgument)
			return
		}
		for key := range values {
			if !slices.Contains(parameterNames, key) && !ForeignKey(key) {
				t.Fatalf("%q is passed over", key)
			}
		}
		local := p.DiskType == DiskTypeLocal
		_, isID := ParseID(p.ImageID)
		switch {
		case !local && p.DiskType != diskTypeDistributed,
			p.BlockSize != 0 && !slices.Contains(BlockSizes, p.BlockSize),
			p.ImageID != "" && !isID, !slices.Contains(placements, p.Placement),
			local && (p.ImageID != "" || p.BlockSize != 0 && p.BlockSize != 4096):
			t.Fatalf("%q are %+v", values, p)
		}
		values["csi.storage.k8s.io/pvc/name"] = "x"
		again, err := ParseParameters(values)
		if err != nil || again.DiskType != p.DiskType || again.BlockSize != p.BlockSize ||
			again.Placement != p.Placement ||
			again.ImageID != p.ImageID || again.MkfsOptions.String() != p.MkfsOptions.String() {
			t.Fatalf("%q are %+v, then %+v, %v", values, p, again, err)
		}
	})
}

// FuzzCapacityRange checks that a size has whole GiB, is in the range, and is possible on the rack
// (OF-7), and that a range is refused only if there is no such size.
func FuzzCapacityRange(f *testing.F) {
	f.Fuzz(func(t *testing.T, required, limit, floor int64, local bool) {
		r, err := ParseCapacityRange(&csi.CapacityRange{RequiredBytes: required, LimitBytes: limit})
		if err != nil {
			csitest.Presentable(t, err, codes.InvalidArgument, codes.OutOfRange)
			if required > 0 && (limit == 0 || limit >= required) {
				t.Fatalf("from %d to %d is refused: %v", required, limit, err)
			}
			return
		}
		p := Parameters{DiskType: diskTypeDistributed}
		if local {
			p.DiskType = DiskTypeLocal
		}
		floor &= 1<<62 - 1
		size, err := r.DiskSize(floor, p.Largest())
		least := new(big.Int).SetInt64(max(required, floor, GiB))
		least.Add(least, big.NewInt(GiB-1)).Div(least, big.NewInt(GiB))
		least.Mul(least, big.NewInt(GiB))
		most := p.Largest()
		if limit > 0 {
			most = min(most, limit)
		}
		possible := least.Cmp(big.NewInt(most)) <= 0
		switch {
		case err != nil && possible:
			t.Fatalf("from %d to %d on %d bytes: %s would do, but: %v", required, limit, floor, least, err)
		case err != nil:
			csitest.Presentable(t, err, codes.OutOfRange)
		case !possible, size%GiB != 0, !r.Contains(size), size < floor, size > p.Largest():
			t.Fatalf("from %d to %d on %d bytes is %d", required, limit, floor, size)
		}
	})
}

// FuzzTopology checks that CSI allows a parsed topology, that every location has the same keys, and
// that no part is lost.
func FuzzTopology(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		locations, err := ParseTopology(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		var again []string
		for _, location := range locations {
			if err := checkSegments(location); err != nil {
				t.Fatalf("%q has a location that CSI does not allow: %v", text, err)
			}
			if !location.Within(location) || !sameKeys(location, locations[0]) {
				t.Fatalf("%q has the locations %v", text, locations)
			}
			var pairs []string
			for key, value := range location {
				pairs = append(pairs, strings.TrimPrefix(key, TopologyPrefix)+"="+value)
			}
			again = append(again, strings.Join(pairs, ","))
		}
		same, err := ParseTopology(strings.Join(again, ";"))
		if err != nil || !slices.EqualFunc(same, locations, maps.Equal[Segments, Segments]) {
			t.Fatalf("%q is %v, then %v, %v", text, locations, same, err)
		}
	})
}

// FuzzMountFlags checks that an error shows no more of a flag than its position, that only allowed
// options are accepted, whatever other options are given, and that only known attributes are set on
// a mount.
func FuzzMountFlags(f *testing.F) {
	known := uint64(AttrReadOnly | attrNoSUID | attrNoDev | attrNoExec | AttrAtimeMask |
		attrNoDirAtime | attrNoSymFollow)
	f.Fuzz(func(t *testing.T, first, second string) {
		for _, fsType := range Filesystems {
			o, err := ParseMountFlags(fsType, []string{first, second})
			if err != nil {
				if !refusedText(fsType, err.Error()) {
					t.Fatalf("the error shows more than the number of the flag: %v", err)
				}
				continue
			}
			if o.Attr&^known != 0 {
				t.Fatalf("%q and %q set the attributes %#x", first, second, o.Attr)
			}
			for _, word := range o.Super {
				if word != "ro" && !slices.Contains(superFlags, word) {
					t.Fatalf("%q and %q give every filesystem %q", first, second, word)
				}
			}
			for _, d := range o.Data {
				if !allowed(fsType, d.Key, d.Value, d.HasValue) || strings.ContainsRune(d.Value, 0) {
					t.Fatalf("%q and %q let %+v through for %s", first, second, d, fsType)
				}
			}
			o.SetReadOnly()
			if !slices.Contains(o.Super, "ro") || !slices.Contains(o.Shown(), "ro") {
				t.Fatalf("%q and %q cannot be made read-only: %+v", first, second, o)
			}
		}
	})
}

// refusedText reports whether an error about two flags has the same text for other flags.
func refusedText(fsType, text string) bool {
	return slices.ContainsFunc([][]string{{"bind"}, {"", "bind"}, {`"`}, {"", `"`}},
		func(flags []string) bool {
			_, err := ParseMountFlags(fsType, flags)
			return err.Error() == text
		})
}

// FuzzMkfsOptions checks that accepted options have an equivalent canonical form, and that no
// argument names a file or makes mkfs overwrite content.
func FuzzMkfsOptions(f *testing.F) {
	options := []string{"-i", "-I", "-b", "-m", "-n", "-L"}
	value := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._=-]*$`)
	f.Fuzz(func(t *testing.T, text string) {
		o, err := ParseMkfsOptions(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		again, err := ParseMkfsOptions(o.String())
		if err != nil || again.String() != o.String() {
			t.Fatalf("%q becomes %q, then %q, %v", text, o, again, err)
		}
		for _, fsType := range Filesystems {
			args := o.Args(fsType)
			for i, arg := range args {
				if i%2 == 0 && !slices.Contains(options, arg) || i%2 == 1 && !value.MatchString(arg) {
					t.Fatalf("%q gives %s the arguments %q", text, fsType, args)
				}
			}
			if len(args)%2 != 0 || (o.Check(fsType, 0) == nil && len(args) != 2*len(o.chosen)) {
				t.Fatalf("%q is fine for %s, but gives %q", text, fsType, args)
			}
		}
	})
}
