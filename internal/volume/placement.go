package volume

import (
	"fmt"
	"maps"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// InstanceKey is the topology key with which a node names its own instance.
const InstanceKey = TopologyPrefix + "instance"

// Placement is where the pods of a volume can run. The disk is the same.
type Placement string

// The placements: wherever the rack's disks can be reached, or only at the instance that the
// scheduler chose when the volume was made.
const (
	placementRack     Placement = "rack"
	PlacementInstance Placement = "instance"
)

// placements has the default first.
var placements = []Placement{placementRack, PlacementInstance}

// Location returns the segments without the instance, which is no part of a location: the rack's
// disks can be reached from every instance there.
func Location(segments map[string]string) Segments {
	location := Segments{}
	for key, value := range segments {
		if !strings.EqualFold(key, InstanceKey) {
			location[key] = value
		}
	}
	return location
}

// ChooseInstance returns where a volume with the placement instance goes: what ChooseTopology
// returns first, at the one instance of the request.
func ChooseInstance(req *csi.TopologyRequirement, ours []Segments, instances bool) (
	[]*csi.Topology, error) {
	if !instances {
		return nil, csierr.New(csierr.TopologyInvalid, "placement instance needs nodes that report "+
			"their instance, and OXIDE_TOPOLOGY_INSTANCE is not true here; set it on controller and nodes")
	}
	list, err := ChooseTopology(req, ours, instances)
	if err != nil {
		return nil, err
	}
	id, err := oneInstance(req.GetRequisite())
	if err != nil {
		return nil, err
	}
	here := Segments{InstanceKey: id}
	if len(list) > 0 {
		maps.Copy(here, list[0].GetSegments())
	}
	return []*csi.Topology{{Segments: here}}, nil
}

// oneInstance returns the instance that all requisite topologies name.
func oneInstance(requisite []*csi.Topology) (string, error) {
	var one, found string
	ids := map[string]bool{}
	for _, t := range requisite {
		one, _ = Segments(t.GetSegments()).value(InstanceKey)
		ids[one] = true
	}
	_, isID := ParseID(one)
	switch {
	case len(requisite) == 0:
		found = "no requisite topology"
	case ids[""]:
		found = "a topology without an instance"
	case len(ids) > 1:
		found = fmt.Sprintf("%d instances", len(ids))
	case !isID:
		found = fmt.Sprintf("%.80q, which is not the UUID of an instance", one)
	default:
		return one, nil
	}
	return "", csierr.New(csierr.TopologyInvalid, "placement instance needs requisite topologies "+
		"with exactly one %s, found %s; set OXIDE_TOPOLOGY_INSTANCE on controller and nodes, "+
		"volumeBindingMode WaitForFirstConsumer in the StorageClass and --strict-topology of the "+
		"provisioner", InstanceKey, found)
}
