package volume

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const (
	here  = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
	there = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
)

var (
	invalid     = fails(csierr.TopologyInvalid)
	unreachable = fails(csierr.TopologyUnreachable)
)

// choices are requests, the locations of the driver, and the chosen topologies.
type choices []struct {
	name string
	req  *csi.TopologyRequirement
	ours string // locations with semicolons between
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

// wish returns a requirement, and requisite the one that the provisioner sends with
// --strict-topology.
func wish(requisite, preferred string) *csi.TopologyRequirement {
	return &csi.TopologyRequirement{Requisite: topologies(requisite), Preferred: topologies(preferred)}
}

func requisite(text string) *csi.TopologyRequirement { return wish(text, text) }

func TestTheTopologyExampleOfTheRFD(t *testing.T) { // D-17
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

func TestTopologyRequirements(t *testing.T) { // D-14
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

func TestTopologySettings(t *testing.T) { // B-27, D-75
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

func TestAVolumeOfTheRackIsAtNoInstance(t *testing.T) {
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

func TestAVolumeWithPlacementInstanceIsAtTheRequestedInstance(t *testing.T) {
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
