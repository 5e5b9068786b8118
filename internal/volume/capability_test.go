package volume

import (
	"maps"
	"math/big"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

var (
	must         = csitest.Must
	fails, coded = csitest.Fails, csitest.Coded
)

func TestOnlySingleNodeWriterModesAreSupported(t *testing.T) { // D-16
	fine := map[csi.VolumeCapability_AccessMode_Mode]bool{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  true,
	}
	for number, name := range csi.VolumeCapability_AccessMode_Mode_name {
		mode := csi.VolumeCapability_AccessMode_Mode(number)
		p := CapabilityProblem(csitest.InMode(mode))
		switch {
		case fine[mode] && p != CapabilityFault{}:
			t.Errorf("%s is refused: %s", name, p.Message)
		case number == 0 && !p.Malformed:
			t.Errorf("%s is not missing", name)
		case number != 0 && !fine[mode] && (!p.Unsupported || !strings.Contains(p.Message, name)):
			t.Errorf("%s: got %+v, want a refusal that names it", name, p)
		}
	}
	if p := CapabilityProblem(csitest.InMode(99)); !p.Unsupported || !strings.Contains(p.Message,
		"99") {
		t.Errorf("a mode of the future: %+v", p)
	}
}

func TestMalformedAndUnsupportedCapabilitiesAreRefused(t *testing.T) { // CV-4, CV-5
	block := csitest.Filesystem("")
	block.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	grouped := csitest.Filesystem("xfs")
	grouped.GetMount().VolumeMountGroup = "1000"
	flagged := func(bytes int) *csi.VolumeCapability {
		c := csitest.Filesystem("xfs")
		c.GetMount().MountFlags = []string{strings.Repeat("tweety", 1000)[:bytes]}
		return c
	}
	typeless := csitest.Filesystem("")
	typeless.AccessType = nil
	for _, test := range []struct {
		name                   string
		c                      *csi.VolumeCapability
		malformed, unsupported bool
	}{
		{"block", block, false, false},
		{"no filesystem named", csitest.Filesystem(""), false, false},
		{"ext4", csitest.Filesystem("ext4"), false, false},
		{"ext3", csitest.Filesystem("ext3"), false, false},
		{"xfs", csitest.Filesystem("xfs"), false, false},
		{"btrfs", csitest.Filesystem("btrfs"), false, false},
		{"ntfs", csitest.Filesystem("ntfs"), false, true},
		{"nothing", nil, true, false},
		{"no access mode", &csi.VolumeCapability{AccessType: block.AccessType}, true, false},
		{"no access type", typeless, true, false},
		{"a mount group", grouped, false, true},
		{"mount flags of 4096 bytes (B-2)", flagged(4096), false, false},
		{"mount flags of 4097 bytes (B-2)", flagged(4097), true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := CapabilityProblem(test.c)
			if p.Malformed != test.malformed || p.Unsupported != test.unsupported {
				t.Fatalf("got %+v", p)
			}
			if (p.Message == "") != (p == CapabilityFault{}) || strings.Contains(p.Message, "tweety") {
				t.Errorf("the message is %q", p.Message)
			}
		})
	}
	loop := csitest.Filesystem("ext4")
	loop.GetMount().MountFlags = []string{"noatime", "loop=/tweety"}
	fails(csierr.FieldMissing)(t, CheckCapabilities(nil))
	for _, c := range []struct {
		bad  *csi.VolumeCapability
		ends func(*testing.T, error)
	}{
		{csitest.Filesystem("ntfs"), fails(csierr.CapabilityUnsupported)},
		{loop, coded(codes.InvalidArgument, csierr.MountFlags)},
		{nil, fails(csierr.CapabilityInvalid)},
	} {
		c.ends(t, CheckCapabilities([]*csi.VolumeCapability{block, c.bad}))
	}
}

func TestDiskSizeIsInWholeGiBWithinTheCapacityRange(t *testing.T) { // CV-11, CV-12
	tooLarge, invalid := fails(csierr.CapacityOutOfRange), fails(csierr.CapacityInvalid)
	for _, test := range []struct {
		name  string
		r     *csi.CapacityRange
		floor int64
		want  int64                   // in GiB
		ends  func(*testing.T, error) // nil means success
	}{
		{"nothing asked", nil, 0, 10, nil},
		{"one and a half become two (D-22)", csitest.Range(GiB+GiB/2, 0), 0, 2, nil},
		{"only a limit above the default", csitest.Range(0, 100*GiB), 0, 10, nil},
		{"only a limit below it", csitest.Range(0, 3*GiB+GiB/2), 0, 3, nil},
		{"limit below required (E-25)", csitest.Range(3*GiB, 2*GiB), 0, 0, tooLarge},
		{"a range that is empty", csitest.Range(0, 0), 0, 0, invalid},
		{"negative required", csitest.Range(-1, 0), 0, 0, invalid},
		{"a source without a range (CV-17)", nil, 4 * GiB, 4, nil},
		{"a source in a larger volume (CV-17)", csitest.Range(6*GiB, 0), 4 * GiB, 6, nil},
		{"a source above required and below the limit (E-25)", csitest.Range(GiB, 9*GiB), 4 * GiB, 4,
			nil},
		{"an image that is no whole GiB", nil, GiB + 512, 2, nil},
		{"a limit below the source", csitest.Range(0, 3*GiB), 4 * GiB, 0,
			fails(csierr.CapacityOutOfRange, "less than the source, which")},
		{"a limit between source and whole GiB", csitest.Range(0, 3*GiB+1), 3*GiB + 1, 0,
			fails(csierr.CapacityOutOfRange, "is above limit_bytes")},
		{"a range between whole GiB", csitest.Range(GiB+1, GiB+2), 0, 0,
			fails(csierr.CapacityOutOfRange, "disks have whole GiB, at l")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := ParseCapacityRange(test.r)
			var got int64
			if err == nil {
				got, err = r.DiskSize(test.floor, MaxDistributedBytes)
			}
			if test.ends != nil {
				test.ends(t, err)
			} else if err != nil || got != test.want*GiB {
				t.Errorf("got %d, %v; want %d GiB", got, err, test.want)
			}
		})
	}
}

const (
	here  = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
	there = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
)

var (
	invalid     = fails(csierr.TopologyInvalid)
	unreachable = fails(csierr.TopologyUnreachable)
)

type choices []struct {
	name string
	req  *csi.TopologyRequirement
	ours string // locations, separated by semicolons
	want string
	ends func(*testing.T, error) // nil means success
}

func (all choices) try(t *testing.T, instances bool, choose func(*csi.TopologyRequirement,
	[]Segments,
	bool) ([]*csi.Topology, error)) {
	for _, test := range all {
		t.Run(test.name, func(t *testing.T) {
			got, err := choose(test.req, locations(t, test.ours), instances)
			if test.ends != nil {
				test.ends(t, err)
				return
			}
			must(t, err)
			if want := topologies(test.want); !slices.EqualFunc(got, want, func(a, b *csi.Topology) bool {
				return maps.Equal(a.GetSegments(), b.GetSegments())
			}) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func topologies(text string) []*csi.Topology {
	return csitest.Topologies(strings.FieldsFunc(text, func(r rune) bool { return r == ';' })...)
}

func locations(t *testing.T, text string) []Segments {
	t.Helper()
	if text == "" {
		return nil
	}
	return csitest.Got(ParseTopology(text))(t)
}

func wish(requisite, preferred string) *csi.TopologyRequirement {
	return &csi.TopologyRequirement{Requisite: topologies(requisite), Preferred: topologies(preferred)}
}

// requisite returns the requirement that the provisioner sends with --strict-topology.
func requisite(text string) *csi.TopologyRequirement { return wish(text, text) }

func TestChooseTopologyPutsPreferredBeforeOtherRequisiteZones(t *testing.T) { // D-17
	const second, third = "region=R1,zone=Z2", "region=R1,zone=Z3"
	example := wish(second+";"+third, third)
	choices{
		{"available in Z3", example, third, third, nil},
		{"falls back to Z2", example, second, second, nil},
		{"prefers Z3 where both are reached", example, second + ";" + third, third + ";" + second, nil},
		{"never elsewhere", example, "region=R1,zone=Z4", "", unreachable},
		{"another region's Z3 is elsewhere", example, "region=R2,zone=Z3", "", unreachable},
	}.try(t, false, ChooseTopology)
}

func TestChooseTopologyRefusesInvalidRequirements(t *testing.T) { // D-14
	raw := func(key, value string) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{Requisite: []*csi.Topology{{
			Segments: map[string]string{key: value}}}}
	}
	twice := raw("x/Rack", "a")
	twice.Requisite[0].Segments["x/rack"] = "a"
	choices{
		{"without a configured topology (CV-8)", wish("rack=a", ""), "", "", invalid},
		{"an empty requirement (CV-9)", &csi.TopologyRequirement{}, "rack=a", "", invalid},
		{"preferred that is not requisite (CV-9)", wish("rack=a", "rack=b"), "rack=a", "", invalid},
		{"no segments (CV-9)", &csi.TopologyRequirement{Requisite: []*csi.Topology{{}}}, "rack=a", "",
			invalid},
		{"a bad key (CV-9)", raw("a/b/c", "d"), "rack=a", "", invalid},
		{"a bad prefix (CV-9)", raw("-x/rack", "a"), "rack=a", "", invalid},
		{"a bad value (CV-9)", raw(TopologyPrefix+"rack", "-"), "rack=a", "", invalid},
		{"a key twice (CV-9)", twice, "rack=a", "", invalid},
		{"another rack (CV-10)", wish("rack=b", ""), "rack=a", "", unreachable},
		{"a key that no node reports (CV-10)", wish("row=1", ""), "rack=a", "", unreachable},
		{"the case of keys does not count (B-27)", raw(strings.ToUpper(TopologyPrefix)+"RACK", "a"),
			"rack=a", "rack=a", nil},
		{"preferred topologies alone demand nothing", wish("", "rack=b"), "rack=a", "rack=a", nil},
		{"no requirement", nil, "rack=a", "rack=a", nil},
		{"no topology at all", nil, "", "", nil},
	}.try(t, false, ChooseTopology)
}

func TestParseTopologyRefusesInvalidSettings(t *testing.T) { // B-27, D-75
	for _, bad := range []string{"rack", "rack=", "=a", "rack=a,rack=b", "rack=a,RACK=b", "rack=-a",
		"rack=a;zone=b", "rack=a;", "a/b=c", "rack=a,instance=b", "Instance=b",
		"rack=" + strings.Repeat("x", 64)} {
		if got, err := ParseTopology(bad); err == nil {
			t.Errorf("parseTopology(%q) = %v", bad, got)
		}
	}
	const prefix = "topology.csi.oxide.computer/" // D-75
	want := []Segments{{prefix + "rack": "a", prefix + "zone": "b"},
		{prefix + "rack": "c", prefix + "zone": "d"}}
	if got := locations(t, "rack=a, zone=b;rack=c,zone=d"); !slices.EqualFunc(got, want,
		maps.Equal[Segments, Segments]) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestChooseTopologyReturnsNoInstances(t *testing.T) {
	choices{
		{"an instance is everywhere without locations (D-74)", requisite(here), "", "", nil},
		{"all are everywhere without locations (D-74)", requisite(here + ";" + there), "", "", nil},
		{"no requirement without locations", nil, "", "", nil},
		{"the instance is ignored beside a location (D-72)", requisite("rack=a," + here), "rack=a",
			"rack=a", nil},
		{"the location of the instance comes first (D-74)", requisite("rack=b," + here), "rack=a;rack=b",
			"rack=b;rack=a", nil},
		{"an instance elsewhere (CV-10)", requisite("rack=b," + here), "rack=a", "", unreachable},
		{"an instance without a location (CV-10)", requisite(here), "rack=a", "", unreachable},
		{"a location that nobody declared (CV-8)", requisite("rack=a," + here), "", "", invalid},
		{"a preferred instance that is not requisite (CV-9)", wish("rack=a,"+here, "rack=a,"+there),
			"rack=a", "", invalid},
	}.try(t, true, ChooseTopology)
}

func TestChooseInstanceReturnsTheRequestedInstance(t *testing.T) {
	upper := requisite(here)
	upper.Requisite[0].Segments = map[string]string{
		strings.ToUpper(InstanceKey): strings.TrimPrefix(here, "instance=")}
	found := func(what string) func(*testing.T, error) {
		return fails(csierr.TopologyInvalid, "found "+what, "OXIDE_TOPOLOGY_INSTANCE",
			"WaitForFirstConsumer", "--strict-topology")
	}
	choices{
		{"without locations (D-61)", requisite(here), "", here, nil},
		{"with a location (D-61)", requisite("rack=a," + here), "rack=a", "rack=a," + here, nil},
		{"at the instance's location of several (D-61)", requisite("rack=b," + here), "rack=a;rack=b",
			"rack=b," + here, nil},
		{"the case of keys does not count (B-27)", &csi.TopologyRequirement{Requisite: upper.Requisite},
			"", here, nil},
		{"no requirement", nil, "", "", found("no requisite topology")},
		{"only preferred topologies", wish("", here), "", "", found("no requisite topology")},
		{"two instances", requisite(here + ";" + there), "", "", found("2 instances")},
		{"no instance", requisite("rack=a"), "rack=a", "", found("a topology without an instance")},
		{"one instance of two topologies", requisite("rack=a;rack=b," + here), "rack=a;rack=b", "",
			found("a topology without an instance")},
		{"no UUID", requisite("instance=worker-1"), "", "",
			found(`"worker-1", which is not the UUID of an instance`)},
		{"an instance elsewhere (CV-10)", requisite("rack=b," + here), "rack=a", "", unreachable},
	}.try(t, true, ChooseInstance)
	choices{{"nodes that do not report it (CV-8)", requisite("rack=a," + here), "rack=a", "",
		fails(csierr.TopologyInvalid, "OXIDE_TOPOLOGY_INSTANCE is not true")}}.try(t, false,
		ChooseInstance)
}

// FuzzCapacityRange checks that DiskSize returns the smallest allowed size in whole GiB or, if
// request and source require none, the default (OF-7), and fails only if no size is allowed.
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
		possible, want := least.Cmp(big.NewInt(most)) <= 0, least.Int64()
		if required == 0 && floor == 0 {
			want = min(defaultSizeBytes, limit-limit%GiB)
		}
		switch {
		case err != nil && possible:
			t.Fatalf("from %d to %d on %d bytes: %s would do, but: %v", required, limit, floor, least, err)
		case err != nil:
			csitest.Presentable(t, err, codes.OutOfRange)
		case !possible, size != want:
			t.Fatalf("from %d to %d on %d bytes is %d", required, limit, floor, size)
		}
		if r.Contains(required-1) || !r.Contains(required) ||
			limit > 0 && (!r.Contains(limit) || r.Contains(limit+1)) {
			t.Fatalf("%+v is not from %d to %d", r, required, limit)
		}
	})
}

// FuzzTopology checks that a parsed topology is valid in CSI, that all its locations have the same
// keys, and that ParseTopology omits nothing.
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
