package volume

import (
	"maps"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestD17TheExampleOfTheRFD(t *testing.T) {
	wish := &csi.TopologyRequirement{
		Requisite: csitest.Topologies("region=R1,zone=Z2", "region=R1,zone=Z3"),
		Preferred: csitest.Topologies("region=R1,zone=Z3"),
	}
	for _, test := range []struct {
		name string
		ours []string
		want string // the zone; empty means refused
	}{
		{"available in Z3", []string{"region=R1,zone=Z3"}, "Z3"},
		{"falls back to Z2", []string{"region=R1,zone=Z2"}, "Z2"},
		{"prefers Z3 where both are reached", []string{"region=R1,zone=Z2", "region=R1,zone=Z3"},
			"Z3"},
		{"never elsewhere", []string{"region=R1,zone=Z4"}, ""},
		{"another region's Z3 is elsewhere", []string{"region=R2,zone=Z3"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ChooseTopology(wish, locations(t, test.ours...), false)
			if test.want == "" {
				csitest.Want(t, err, codes.ResourceExhausted, csierr.TopologyUnreachable)
				return
			}
			must(t, err)
			if len(got) != len(test.ours) || got[0].Segments[TopologyPrefix+"zone"] != test.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestTopologyRequirements(t *testing.T) { // D-14
	raw := func(segments map[string]string) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: segments}}}
	}
	needs := func(text string) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{Requisite: csitest.Topologies(text)}
	}
	type segments = map[string]string
	ours := locations(t, "rack=a")
	for _, test := range []struct {
		name   string
		req    *csi.TopologyRequirement
		ours   []Segments
		reason csierr.Reason
	}{
		{"CV-8 without a topology of ours", needs("rack=a"), nil, csierr.TopologyInvalid},
		{"CV-9 an empty requirement", &csi.TopologyRequirement{}, ours, csierr.TopologyInvalid},
		{"CV-9 preferred that is not requisite", &csi.TopologyRequirement{
			Requisite: csitest.Topologies("rack=a"), Preferred: csitest.Topologies("rack=b")}, ours,
			csierr.TopologyInvalid},
		{"CV-9 no segments", raw(nil), ours, csierr.TopologyInvalid},
		{"CV-9 a bad key", raw(segments{"a/b/c": "d"}), ours, csierr.TopologyInvalid},
		{"CV-9 a bad prefix", raw(segments{"-x/rack": "a"}), ours, csierr.TopologyInvalid},
		{"CV-9 a bad value", raw(segments{TopologyPrefix + "rack": "-"}), ours, csierr.TopologyInvalid},
		{"CV-9 a key twice", raw(segments{"x/Rack": "a", "x/rack": "a"}), ours, csierr.TopologyInvalid},
		{"CV-10 another rack", needs("rack=b"), ours, csierr.TopologyUnreachable},
		{"CV-10 a key we do not have", needs("row=1"), ours, csierr.TopologyUnreachable},
		{"B-27 the case of keys does not count", raw(segments{
			strings.ToUpper(TopologyPrefix) + "RACK": "a"}), ours, ""},
		{"a wish alone is no demand", &csi.TopologyRequirement{Preferred: csitest.Topologies("rack=b")},
			ours, ""},
		{"no requirement", nil, ours, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ChooseTopology(test.req, test.ours, false)
			switch test.reason {
			case csierr.TopologyInvalid:
				csitest.Want(t, err, codes.InvalidArgument, test.reason)
				return
			case csierr.TopologyUnreachable:
				csitest.Want(t, err, codes.ResourceExhausted, test.reason)
				return
			}
			if err != nil || len(got) != 1 || !maps.Equal(got[0].Segments, test.ours[0]) {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
	if got, err := ChooseTopology(nil, nil, false); got != nil || err != nil {
		t.Errorf("without any topology: %v, %v", got, err)
	}
}

func TestB27TopologySettings(t *testing.T) { // D-75
	for _, bad := range []string{"rack", "rack=", "=a", "rack=a,rack=b", "rack=a,RACK=b", "rack=-a",
		"rack=a;zone=b", "rack=a;", "a/b=c", "rack=a,instance=b", "Instance=b",
		"rack=" + strings.Repeat("x", 64)} {
		if got, err := ParseTopology(bad); err == nil {
			t.Errorf("parseTopology(%q) = %v", bad, got)
		}
	}
	got := locations(t, "rack=a, zone=b;rack=c,zone=d")
	if len(got) != 2 || got[0]["topology.csi.oxide.computer/rack"] != "a" ||
		got[1]["topology.csi.oxide.computer/zone"] != "d" {
		t.Errorf("got %v", got)
	}
	for key := range got[0] {
		if !strings.HasPrefix(key, TopologyPrefix) {
			t.Errorf("D-75: the key %s has another prefix", key)
		}
	}
}

// locations reads topologies, "region=R1,zone=Z2".
func locations(t *testing.T, texts ...string) []Segments {
	t.Helper()
	var list []Segments
	for _, text := range texts {
		parsed, err := ParseTopology(text)
		must(t, err)
		list = append(list, parsed...)
	}
	return list
}
