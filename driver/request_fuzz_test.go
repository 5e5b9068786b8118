package driver

import (
	"fmt"
	"io"
	"maps"
	"math"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

var startsWithReason = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*: \S`)

// presentable demands of an error that it has one of the codes, and a message that may be shown to
// anybody: a reason, one line of bounded length, no token.
func presentable(t *testing.T, err error, allowed ...codes.Code) {
	t.Helper()
	s := status.Convert(err)
	message := s.Message()
	switch {
	case !slices.Contains(allowed, s.Code()):
		t.Fatalf("the code is %v: %v", s.Code(), err)
	case !startsWithReason.MatchString(message), strings.ContainsAny(message, "\n\r\x00"),
		!utf8.ValidString(message), len(message) > 1200, csierr.WithoutTokens(message) != message:
		t.Fatalf("the message is %q", message)
	}
}

// pairs reads lines of key=value.
func pairs(text string) map[string]string {
	values := map[string]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if key, value, ok := strings.Cut(line, "="); ok {
			values[key] = value
		}
	}
	return values
}

// FuzzParameters holds that parameters which are accepted mean one disk that a rack can make, that
// nothing unknown is passed over, and that what a CO adds for itself changes nothing.
func FuzzParameters(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		values := pairs(text)
		p, err := parseParameters(values)
		if err != nil {
			presentable(t, err, codes.InvalidArgument)
			return
		}
		for key := range values {
			if !slices.Contains(parameterNames, key) && !foreignKey(key) {
				t.Fatalf("%q is passed over", key)
			}
		}
		local := p.DiskType == oxide.DiskTypeLocal
		_, isID := rackID(string(p.ImageID))
		switch {
		case !local && p.DiskType != oxide.DiskTypeDistributed,
			p.BlockSize != 0 && !slices.Contains(blockSizes, p.BlockSize),
			p.ImageID != "" && !isID,
			local && (p.ImageID != "" || p.BlockSize != 0 && p.BlockSize != 4096):
			t.Fatalf("%q are %+v", values, p)
		}
		values["csi.storage.k8s.io/pvc/name"] = "x"
		again, err := parseParameters(values)
		if err != nil || again.DiskType != p.DiskType || again.BlockSize != p.BlockSize ||
			again.ImageID != p.ImageID || again.MkfsOptions.String() != p.MkfsOptions.String() {
			t.Fatalf("%q are %+v, then %+v, %v", values, p, again, err)
		}
	})
}

// FuzzStartingToken holds that a token which is none of ours is ABORTED, and that from one that is
// the pages show every object behind it once, in order, however long they are.
func FuzzStartingToken(f *testing.F) {
	var ids []string
	for i := range 40 {
		ids = append(ids, fmt.Sprintf("%08x-0000-4000-8000-000000000000", i*0x06000000))
	}
	c := &Controller{Project: testProject}
	f.Fuzz(func(t *testing.T, token string, most int32) {
		_, err := c.newPager(token, most)
		after, _, paged := strings.Cut(token, ".")
		switch ours := token == "" || lowerUUID.MatchString(after) && (!paged || err == nil); {
		case most < 0:
			presentable(t, err, codes.InvalidArgument)
			return
		case !ours:
			presentable(t, err, codes.Aborted)
			return
		case err != nil:
			t.Fatalf("the token %q is refused: %v", token, err)
		}
		var shown, want []string
		for _, id := range ids {
			if id > after {
				want = append(want, id)
			}
		}
		for at, turn := token, 0; ; turn++ {
			page, err := c.newPager(at, most)
			if err != nil || turn > len(ids) {
				t.Fatalf("page %d, with the token %q: %v", turn, at, err)
			}
			before := len(shown)
			for _, id := range ids {
				if page.take(id, &csi.Volume{}) {
					shown = append(shown, id)
				}
				if page.full() {
					break
				}
			}
			if most > 0 && len(shown)-before > int(most) {
				t.Fatalf("a page of %d, where %d were asked for", len(shown)-before, most)
			}
			if at = page.next; at == "" {
				break
			}
		}
		if !slices.Equal(shown, want) {
			t.Fatalf("behind %q in pages of %d: %q, want %q", token, most, shown, want)
		}
	})
}

// FuzzCapacityRange holds that a size is whole GiB, in the range, and what the rack can make; and
// that a refusal is right: there is no such size.
func FuzzCapacityRange(f *testing.F) {
	f.Fuzz(func(t *testing.T, required, limit, floor int64, local bool) {
		r, err := parseCapacityRange(&csi.CapacityRange{RequiredBytes: required, LimitBytes: limit})
		if err != nil {
			presentable(t, err, codes.InvalidArgument, codes.OutOfRange)
			if required > 0 && (limit == 0 || limit >= required) {
				t.Fatalf("from %d to %d is refused: %v", required, limit, err)
			}
			return
		}
		p := parameters{DiskType: oxide.DiskTypeDistributed}
		if local {
			p.DiskType = oxide.DiskTypeLocal
		}
		floor &= 1<<62 - 1
		size, err := r.diskSize(floor, p.largest())
		least := new(big.Int).SetInt64(max(required, floor, gibBytes))
		least.Add(least, big.NewInt(gibBytes-1)).Div(least, big.NewInt(gibBytes))
		least.Mul(least, big.NewInt(gibBytes))
		most := p.largest()
		if limit > 0 {
			most = min(most, limit)
		}
		possible := least.Cmp(big.NewInt(most)) <= 0
		switch {
		case err != nil && possible:
			t.Fatalf("from %d to %d on %d bytes: %s would do, but: %v", required, limit, floor,
				least, err)
		case err != nil:
			presentable(t, err, codes.OutOfRange)
		case !possible, size%gibBytes != 0, !r.contains(size), size < floor, size > p.largest():
			t.Fatalf("from %d to %d on %d bytes is %d", required, limit, floor, size)
		}
	})
}

// FuzzSizes holds that no size that comes from outside runs over.
func FuzzSizes(f *testing.F) {
	most := big.NewInt(math.MaxInt64)
	f.Fuzz(func(t *testing.T, a, b uint64) {
		want := new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
		if want.Cmp(most) > 0 {
			want = most
		}
		if got := product(a, b); got != want.Int64() {
			t.Fatalf("product(%d, %d) = %d, want %s", a, b, got, want)
		}
		size := int64(a >> 1)
		got := roundUp(size)
		if got%gibBytes != 0 || got < 0 || got-size >= gibBytes || size-got >= gibBytes {
			t.Fatalf("roundUp(%d) = %d", size, got)
		}
	})
}

// FuzzTopology holds that what an operator's topology becomes is what CSI allows, that every place
// has the same keys, and that nothing of it is lost.
func FuzzTopology(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		places, err := parseTopology(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		var again []string
		for _, place := range places {
			if err := checkSegments(place); err != nil {
				t.Fatalf("%q has a place that CSI does not allow: %v", text, err)
			}
			if !place.within(place) || !sameKeys(place, places[0]) {
				t.Fatalf("%q has the places %v", text, places)
			}
			var pairs []string
			for key, value := range place {
				pairs = append(pairs, strings.TrimPrefix(key, topologyPrefix)+"="+value)
			}
			again = append(again, strings.Join(pairs, ","))
		}
		same, err := parseTopology(strings.Join(again, ";"))
		if err != nil || !slices.EqualFunc(same, places, maps.Equal[Segments, Segments]) {
			t.Fatalf("%q is %v, then %v, %v", text, places, same, err)
		}
	})
}

// FuzzVolumeName holds that every name that CSI allows gets a name of the rack's, whole in the
// guest's serial, and comes back out of the disk's description.
func FuzzVolumeName(f *testing.F) {
	f.Fuzz(func(t *testing.T, name, cluster string) {
		if !utf8.ValidString(name) || !utf8.ValidString(cluster) {
			return // never comes through gRPC
		}
		if err := checkName(name); err != nil {
			presentable(t, err, codes.InvalidArgument)
			if name != "" && len(name) <= 128 && !strings.ContainsFunc(name, func(r rune) bool {
				return r < ' ' || r >= 0x7f && r <= 0x9f
			}) {
				t.Fatalf("%q is refused: %v", name, err)
			}
			return
		}
		disk := diskName(cluster, name)
		if !isOwnName(disk) || !rackName.MatchString(disk) || diskSerial(disk) != disk {
			t.Fatalf("%q is the disk %q", name, disk)
		}
		want := mark{Name: name, Cluster: cluster}
		if got, ok := readMark(want.description()); !ok || got != want {
			t.Fatalf("%q becomes %+v, %t", want.description(), got, ok)
		}
	})
}

// FuzzConfig holds that no configuration, however wrong, shows a value in its error, or says more
// than one line.
func FuzzConfig(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		env := pairs(strings.ReplaceAll(text, "%", canary))
		_, err := ParseConfig(nil, func(name string) string { return env[name] }, io.Discard)
		if err != nil && (strings.Contains(err.Error(), canary) ||
			strings.ContainsAny(err.Error(), "\n\r\x00")) {
			t.Fatalf("%q: the error is %q", env, err)
		}
	})
}
