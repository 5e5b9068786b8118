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

const (
	here  = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"
	there = "instance=5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
)

// requisite is what the provisioner asks for with --strict-topology.
func requisite(texts ...string) *csi.TopologyRequirement {
	return &csi.TopologyRequirement{Requisite: csitest.Topologies(texts...),
		Preferred: csitest.Topologies(texts...)}
}

func TestAVolumeOfTheRackIsAtNoInstance(t *testing.T) {
	for _, test := range []struct {
		name string
		req  *csi.TopologyRequirement
		ours []string
		want string // the locations that are answered
		code codes.Code
	}{
		{"D-74 an instance is everywhere without locations", requisite(here), nil, "", codes.OK},
		{"D-74 so are all instances", requisite(here, there), nil, "", codes.OK},
		{"no requirement without locations", nil, nil, "", codes.OK},
		{"D-72 the instance is ignored beside a location", requisite("rack=a," + here),
			[]string{"rack=a"}, "rack=a", codes.OK},
		{"D-74 the location of the instance comes first", requisite("rack=b," + here),
			[]string{"rack=a", "rack=b"}, "rack=b;rack=a", codes.OK},
		{"CV-10 an instance elsewhere", requisite("rack=b," + here), []string{"rack=a"}, "",
			codes.ResourceExhausted},
		{"CV-10 an instance without a location", requisite(here), []string{"rack=a"}, "",
			codes.ResourceExhausted},
		{"CV-8 a location that nobody declared", requisite("rack=a," + here), nil, "",
			codes.InvalidArgument},
		{"CV-9 a preferred instance that is not requisite", &csi.TopologyRequirement{
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

func TestAVolumeWithThePlacementInstanceIsAtTheOneOfTheRequest(t *testing.T) {
	upper := strings.ToUpper(TopologyPrefix) + "INSTANCE"
	for _, test := range []struct {
		name string
		req  *csi.TopologyRequirement
		ours []string
		want string // what is answered; empty means refused
		says string
	}{
		{"D-61 without locations", requisite(here), nil, here, ""},
		{"D-61 with a location", requisite("rack=a," + here), []string{"rack=a"}, "rack=a," + here, ""},
		{"D-61 at the instance's location of several", requisite("rack=b," + here),
			[]string{"rack=a", "rack=b"}, "rack=b," + here, ""},
		{"B-27 the case of keys does not count", &csi.TopologyRequirement{
			Requisite: []*csi.Topology{{Segments: map[string]string{
				upper: strings.TrimPrefix(here, "instance=")}}}}, nil, here, ""},
		{"no requirement", nil, nil, "", "found no requisite topology"},
		{"a wish alone", &csi.TopologyRequirement{Preferred: csitest.Topologies(here)}, nil, "",
			"found no requisite topology"},
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

// wantTopology compares topologies with "rack=a,zone=b;rack=c,zone=d".
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
