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

func TestTheTopologyExampleOfTheRFD(t *testing.T) { // D-17
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
		{"prefers Z3 where both are reached", []string{"region=R1,zone=Z2", "region=R1,zone=Z3"}, "Z3"},
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
		{"without a configured topology (CV-8)", needs("rack=a"), nil, csierr.TopologyInvalid},
		{"an empty requirement (CV-9)", &csi.TopologyRequirement{}, ours, csierr.TopologyInvalid},
		{"preferred that is not requisite (CV-9)", &csi.TopologyRequirement{
			Requisite: csitest.Topologies("rack=a"), Preferred: csitest.Topologies("rack=b")}, ours,
			csierr.TopologyInvalid},
		{"no segments (CV-9)", raw(nil), ours, csierr.TopologyInvalid},
		{"a bad key (CV-9)", raw(segments{"a/b/c": "d"}), ours, csierr.TopologyInvalid},
		{"a bad prefix (CV-9)", raw(segments{"-x/rack": "a"}), ours, csierr.TopologyInvalid},
		{"a bad value (CV-9)", raw(segments{TopologyPrefix + "rack": "-"}), ours, csierr.TopologyInvalid},
		{"a key twice (CV-9)", raw(segments{"x/Rack": "a", "x/rack": "a"}), ours, csierr.TopologyInvalid},
		{"another rack (CV-10)", needs("rack=b"), ours, csierr.TopologyUnreachable},
		{"a key that no node reports (CV-10)", needs("row=1"), ours, csierr.TopologyUnreachable},
		{"the case of keys does not count (B-27)", raw(segments{
			strings.ToUpper(TopologyPrefix) + "RACK": "a"}), ours, ""},
		{"preferred topologies alone demand nothing", &csi.TopologyRequirement{
			Preferred: csitest.Topologies("rack=b")}, ours, ""},
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

func TestTopologySettings(t *testing.T) { // B-27, D-75
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

const (
	here  = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
	there = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
)

// requisite returns the requirement that the provisioner sends with --strict-topology.
func requisite(texts ...string) *csi.TopologyRequirement {
	return &csi.TopologyRequirement{Requisite: csitest.Topologies(texts...),
		Preferred: csitest.Topologies(texts...)}
}

func TestAVolumeOfTheRackIsAtNoInstance(t *testing.T) {
	for _, test := range []struct {
		name string
		req  *csi.TopologyRequirement
		ours []string
		want string // the locations in the answer
		code codes.Code
	}{
		{"an instance is everywhere without locations (D-74)", requisite(here), nil, "", codes.OK},
		{"all are everywhere without locations (D-74)", requisite(here, there), nil, "", codes.OK},
		{"no requirement without locations", nil, nil, "", codes.OK},
		{"the instance is ignored beside a location (D-72)", requisite("rack=a," + here),
			[]string{"rack=a"}, "rack=a", codes.OK},
		{"the location of the instance comes first (D-74)", requisite("rack=b," + here),
			[]string{"rack=a", "rack=b"}, "rack=b;rack=a", codes.OK},
		{"an instance elsewhere (CV-10)", requisite("rack=b," + here), []string{"rack=a"}, "",
			codes.ResourceExhausted},
		{"an instance without a location (CV-10)", requisite(here), []string{"rack=a"}, "",
			codes.ResourceExhausted},
		{"a location that nobody declared (CV-8)", requisite("rack=a," + here), nil, "",
			codes.InvalidArgument},
		{"a preferred instance that is not requisite (CV-9)", &csi.TopologyRequirement{
			Requisite: csitest.Topologies("rack=a," + here),
			Preferred: csitest.Topologies("rack=a," + there)}, []string{"rack=a"}, "",
			codes.InvalidArgument},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ChooseTopology(test.req, locations(t, test.ours...), true)
			switch test.code {
			case codes.InvalidArgument:
				csitest.Want(t, err, test.code, csierr.TopologyInvalid)
			case codes.ResourceExhausted:
				csitest.Want(t, err, test.code, csierr.TopologyUnreachable)
			default:
				wantTopology(t, got, err, test.want)
			}
		})
	}
}

func TestAVolumeWithPlacementInstanceIsAtTheRequestedInstance(t *testing.T) {
	upper := strings.ToUpper(TopologyPrefix) + "INSTANCE"
	for _, test := range []struct {
		name string
		req  *csi.TopologyRequirement
		ours []string
		want string // what is answered; empty means refused
		says string
	}{
		{"without locations (D-61)", requisite(here), nil, here, ""},
		{"with a location (D-61)", requisite("rack=a," + here), []string{"rack=a"}, "rack=a," + here, ""},
		{"at the instance's location of several (D-61)", requisite("rack=b," + here),
			[]string{"rack=a", "rack=b"}, "rack=b," + here, ""},
		{"the case of keys does not count (B-27)", &csi.TopologyRequirement{
			Requisite: []*csi.Topology{{Segments: map[string]string{
				upper: strings.TrimPrefix(here, "instance=")}}}}, nil, here, ""},
		{"no requirement", nil, nil, "", "found no requisite topology"},
		{"only preferred topologies", &csi.TopologyRequirement{Preferred: csitest.Topologies(here)}, nil,
			"", "found no requisite topology"},
		{"two instances", requisite(here, there), nil, "", "found 2 instances"},
		{"no instance", requisite("rack=a"), []string{"rack=a"}, "",
			"found a topology without an instance"},
		{"one instance of two topologies", requisite("rack=a", "rack=b,"+here),
			[]string{"rack=a", "rack=b"}, "", "found a topology without an instance"},
		{"no UUID", requisite("instance=worker-1"), nil, "",
			`found "worker-1", which is not the UUID of an instance`},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ChooseInstance(test.req, locations(t, test.ours...), true)
			if test.want != "" {
				wantTopology(t, got, err, test.want)
				return
			}
			csitest.Want(t, err, codes.InvalidArgument, csierr.TopologyInvalid)
			for _, part := range []string{test.says, "OXIDE_TOPOLOGY_INSTANCE", "WaitForFirstConsumer",
				"--strict-topology"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v does not say %q", err, part)
				}
			}
		})
	}
	_, err := ChooseInstance(requisite("rack=b,"+here), locations(t, "rack=a"), true)
	csitest.Want(t, err, codes.ResourceExhausted, csierr.TopologyUnreachable) // CV-10
	_, err = ChooseInstance(requisite("rack=a,"+here), locations(t, "rack=a"), false)
	csitest.Want(t, err, codes.InvalidArgument, csierr.TopologyInvalid) // CV-8
	if !strings.Contains(err.Error(), "OXIDE_TOPOLOGY_INSTANCE is not true") {
		t.Errorf("%v does not name the setting", err)
	}
}

func wantTopology(t *testing.T, got []*csi.Topology, err error, text string) {
	t.Helper()
	var want []*csi.Topology
	if text != "" {
		want = csitest.Topologies(strings.Split(text, ";")...)
	}
	if err != nil || len(got) != len(want) {
		t.Fatalf("got %v, %v; want %v", got, err, want)
	}
	for i := range want {
		if !maps.Equal(got[i].GetSegments(), want[i].GetSegments()) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
}
