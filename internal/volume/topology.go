package volume

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// TopologyPrefix is the prefix of the driver's topology keys, as CSI requires.
const TopologyPrefix = "topology.csi.oxide.computer/"

// Segments is a location: topology keys with their values. The operator chooses keys and values,
// because the rack's API does not tell in which region and rack a user's instances are.
type Segments map[string]string

var (
	topologyWord   = Word{63, regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$`)}
	topologyDomain = Word{63, regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)}
)

// ParseTopology parses locations such as "rack=a,zone=b;rack=a,zone=c". The same disks can be
// reached from all of them (D-74).
func ParseTopology(text string) ([]Segments, error) {
	var locations []Segments
	for part := range strings.SplitSeq(text, ";") {
		location := Segments{}
		for pair := range strings.SplitSeq(part, ",") {
			name, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
			if !ok {
				return nil, errors.New("has to be key=value pairs such as rack=a,zone=b")
			}
			if err := location.Add(name, value); err != nil {
				return nil, err
			}
		}
		locations = append(locations, location)
	}
	if slices.ContainsFunc(locations, func(l Segments) bool { return !sameKeys(l, locations[0]) }) {
		return nil, errors.New("has to give every location the same keys")
	}
	return locations, nil
}

// Add adds a segment, with TopologyPrefix before its name.
func (s Segments) Add(name, value string) error {
	switch {
	case strings.EqualFold(TopologyPrefix+name, InstanceKey):
		return errors.New("cannot have the key instance, with which nodes name their own instance if " +
			"OXIDE_TOPOLOGY_INSTANCE (--topology-instance) is true; use another key")
	case !topologyWord.MatchString(name) || !topologyWord.MatchString(value):
		return errors.New("needs keys and values of at most 63 letters, digits, dots, hyphens and " +
			"underscores, with a letter or digit at both ends")
	}
	if _, twice := s.value(TopologyPrefix + name); twice {
		return errors.New("has a key twice; the case of keys does not count")
	}
	s[TopologyPrefix+name] = value
	return nil
}

func (s Segments) value(key string) (string, bool) {
	for k, v := range s {
		if strings.EqualFold(k, key) {
			return v, true
		}
	}
	return "", false
}

// Within reports whether wanted is not empty and s has all segments of wanted.
func (s Segments) Within(wanted map[string]string) bool {
	for key, want := range wanted {
		if got, ok := s.value(key); !ok || got != want {
			return false
		}
	}
	return len(wanted) > 0
}

func sameKeys(a, b Segments) bool {
	for key := range a {
		if _, ok := b.value(key); !ok {
			return false
		}
	}
	return len(a) == len(b)
}

// ChooseTopology returns a volume's topology: all locations in ours, because each can reach the
// rack's disks. The first is the one that the request prefers most, or one that it allows. If ours
// is empty, so is the topology. Then the request must contain only instances, and nodes must report
// them (the parameter instances is true). Instances never change the result.
func ChooseTopology(req *csi.TopologyRequirement, ours []Segments, instances bool) (
	[]*csi.Topology, error) {
	if req == nil {
		return AccessibleTopologies(ours, nil), nil
	}
	if len(ours) == 0 && !instances {
		return nil, noTopology("accessibility_requirements are")
	}
	if err := checkTopologyRequirement(req); err != nil {
		return nil, err
	}
	for _, wanted := range slices.Concat(req.GetPreferred(), req.GetRequisite()) {
		location := Location(wanted.GetSegments())
		if len(ours) == 0 && len(location) > 0 {
			return nil, noTopology("accessibility_requirements are")
		}
		for _, here := range ours {
			if here.Within(location) {
				return AccessibleTopologies(ours, here), nil
			}
		}
	}
	switch {
	case len(ours) == 0: // the request contains only instances, which all reach the rack's disks
	case len(req.GetRequisite()) > 0: // a preference is not a requirement
		return nil, csierr.New(csierr.TopologyUnreachable, "none of the %d requisite topologies is "+
			"where this rack's disks can be reached: %s", len(req.GetRequisite()), ours)
	}
	return AccessibleTopologies(ours, nil), nil
}

// CanReach reports whether the rack's disks can be reached from a GetCapacity request's topology.
func CanReach(wanted *csi.Topology, ours []Segments, instances bool) (bool, error) {
	if wanted == nil {
		return true, nil
	}
	location := Location(wanted.GetSegments())
	if len(ours) == 0 {
		if instances && len(location) == 0 {
			return true, nil
		}
		return false, noTopology("accessible_topology is")
	}
	return slices.ContainsFunc(ours, func(here Segments) bool { return here.Within(location) }), nil
}

func noTopology(what string) error {
	return csierr.New(csierr.TopologyInvalid, "%s set, but this plugin was started without a "+
		"topology; set OXIDE_TOPOLOGY on controller and nodes", what)
}

// AccessibleTopologies returns all locations in ours, beginning with the chosen one.
func AccessibleTopologies(ours []Segments, chosen Segments) []*csi.Topology {
	var list []*csi.Topology
	if chosen != nil {
		list = append(list, &csi.Topology{Segments: maps.Clone(chosen)})
	}
	for _, here := range ours {
		if !maps.Equal(here, chosen) {
			list = append(list, &csi.Topology{Segments: maps.Clone(here)})
		}
	}
	return list
}

func checkTopologyRequirement(req *csi.TopologyRequirement) error {
	if len(req.GetRequisite()) == 0 && len(req.GetPreferred()) == 0 {
		return invalidTopology("has neither requisite nor preferred topologies")
	}
	requisite := map[string]bool{}
	for i, t := range slices.Concat(req.GetRequisite(), req.GetPreferred()) {
		if err := checkSegments(t.GetSegments()); err != nil {
			return err
		}
		switch place := canonical(t.GetSegments()); {
		case i < len(req.GetRequisite()):
			requisite[place] = true
		case len(requisite) > 0 && !requisite[place]:
			return invalidTopology("prefers a topology that is not among the requisite ones")
		}
	}
	return nil
}

// canonical returns equal texts only for equal topologies: keys are in lower case, and no valid key
// or value contains "=" or a comma.
func canonical(segments Segments) string {
	var pairs []string
	for key, value := range segments {
		pairs = append(pairs, strings.ToLower(key)+"="+value)
	}
	slices.Sort(pairs)
	return strings.Join(pairs, ",")
}

func checkSegments(segments map[string]string) error {
	if len(segments) == 0 {
		return invalidTopology("has a topology without segments")
	}
	seen := map[string]bool{}
	for key, value := range segments {
		prefix, name, prefixed := strings.Cut(key, "/")
		if !prefixed {
			name = key
		}
		switch {
		case prefixed && !topologyDomain.MatchString(strings.ToLower(prefix)),
			!topologyWord.MatchString(name):
			return invalidTopology("has the key %.80q; a key is an optional domain name, a slash, "+
				"and at most 63 letters, digits, dots, hyphens and underscores", key)
		case !topologyWord.MatchString(value):
			return invalidTopology("has the value %.80q for %s; a value has at most 63 letters, "+
				"digits, dots, hyphens and underscores", value, key)
		case seen[strings.ToLower(key)]:
			return invalidTopology("has the key %s twice; case does not count", key)
		}
		seen[strings.ToLower(key)] = true
	}
	return nil
}

func invalidTopology(format string, args ...any) error {
	return csierr.New(csierr.TopologyInvalid, "accessibility_requirements %s",
		fmt.Sprintf(format, args...))
}

// InstanceKey is the topology key whose value is the node's own instance.
const InstanceKey = TopologyPrefix + "instance"

// Placement restricts where a volume's pods can run. It does not affect the disk.
type Placement string

// With placement=rack, a volume's pods run wherever the rack's disks can be reached. With
// placement=instance, they run only at the instance that the scheduler chose at the volume's
// creation.
const (
	placementRack     Placement = "rack"
	PlacementInstance Placement = "instance"
)

var placements = []Placement{placementRack, PlacementInstance}

// Location returns the segments without the instance: every instance at a location can reach the
// rack's disks.
func Location(segments map[string]string) Segments {
	location := Segments{}
	for key, value := range segments {
		if !strings.EqualFold(key, InstanceKey) {
			location[key] = value
		}
	}
	return location
}

// ChooseInstance returns the topology of a volume with placement=instance: the requested instance,
// and the first location that ChooseTopology returns.
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
