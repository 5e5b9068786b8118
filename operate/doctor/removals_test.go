package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// partLinks maps the parts of a healthy chain's evidence to their links: the first pattern that
// matches a path counts.
var partLinks = []struct {
	pattern string
	link    Link
}{
	{`^/cluster/objects/PersistentVolumeClaim`, LinkClaim},
	{`^/cluster/objects/PersistentVolume`, LinkVolume},
	{`^/cluster/objects/VolumeAttachment`, LinkAttachment},
	{`^/cluster/objects/(CSINode|Node)`, LinkNode},
	{`^/cluster/objects/Pod`, LinkPod},
	{`^/nodes/(driverPods|namespace)`, LinkNode},
	{`^/rack/(cluster|project)`, LinkRack},
	{`^/rack/instances`, LinkInstance},
	{`^/rack/disks`, LinkDisk},
	{`^/rack/neighbours`, LinkSerial},
	{`^/nodes/reports/[^/]+/volumes/0/record`, LinkSerial},
	{`^/nodes/reports/[^/]+/volumes/0/filesystems`, LinkFilesystem},
	{`^/nodes/reports/[^/]+/volumes/0/mounts`, LinkMounts},
	{`^/nodes/reports`, LinkDevice},
}

// irrelevant contains the parts of a healthy chain that do not change the diagnosis, and why.
var irrelevant = []struct{ parts, why string }{
	{`.*/(metadata/(creationTimestamp|uid)|Pod:oxide-[^/]+/metadata/namespace|` +
		`VolumeAttachment:csi-1/metadata|(VolumeAttachment:csi-1|Pod:[^/]+)/metadata/name)`,
		"every object has it"},
	{`.*/PersistentVolumeClaim:data/(metadata/annotations(/.*)?|spec/storageClassName)`,
		"it matters until the claim is bound"},
	{`.*/PersistentVolume(Claim)?:[^/]+/spec/volumeMode`, "without one, it is Filesystem"},
	{`.*/PersistentVolume:[^/]+/spec/capacity(/.*)?`, "the disk has the size"},
	{`.*/PersistentVolume:[^/]+/spec/csi/volumeAttributes(/.*)?`, "the rack has the disk's name"},
	{`/rack/disks/[^/]+/object/claim`, "it is a label"},
	{`.*/CSINode:worker-1/spec/drivers/0(/.*)?`, "it is of another driver"},
	{`.*/CSINode:worker-1/spec/drivers/1/allocatable(/.*)?`,
		"it limits the next volumes, not this one"},
	{`.*/conditions/0/lastTransitionTime`, "the state counts, not its time"},
	{`.*/Pod:db-0/spec/volumes/0/name`, "the claim's name counts"},
	{`.*/Pod:db-0/status/(phase|containerStatuses(/.*)?)`,
		"the pod runs by the one or by the other, and a container that is not ready has its volumes"},
	{`.*/Pod:oxide-csi-node-x/metadata/ownerReferences/0/uid`, "Gather compared them"},
	{`.*/Pod:oxide-csi-node-x/status/containerStatuses/[0-9](/name|/state|/state/running)?`,
		"ready counts"},
	{`.*/Pod:oxide-csi-controller-x(/.*)?`,
		"it matters where something waits for it: see processes"},
	{`/nodes/namespace`, "it is for commands"},
	{`/nodes/reports/[^/]+/(at|format|version)`, "the parser refuses another format"},
	{`/nodes/reports/[^/]+/instance`, "the report is named by it, or its list unseen has it"},
	{`/nodes/reports/[^/]+/devices(/.*)?`, "the volume has its device in a list of its own"},
	{`/nodes/reports/[^/]+/volumes/0/devices/0/(blockBytes|name|number|serial)`,
		"the device was found by its serial number; the rest is shown"},
	{`/nodes/reports/[^/]+/volumes/0/filesystems/0/(sizeBytes|type)`,
		"the UUID tells whose it is"},
	{`/nodes/reports/[^/]+/volumes/0/(flight|open|from)`,
		"what is there counts, not how it came"},
	{`/nodes/reports/[^/]+/volumes/0/record(/instance)?`, "the driver needs no memory"},
	{`/nodes/reports/[^/]+/volumes/0/mounts/[0-9]/fsType`, "it is shown"},
	{`/nodes/reports/[^/]+/volumes/0/mounts/(0|2)(/.*)?`,
		"the pod has the volume by its own path"},
	{`/rack/cluster`, "a cluster may have no id"},
	{`/rack/disks/[^/]+/object/(filesystemUUID|id|type)`,
		"it is asked for by its id; the others may be missing"},
	{`/rack/instances/[^/]+/object/(id|name)`, "it is asked for by its id"},
	{`/rack/neighbours/[^/]+/object/0(/[^i].*|/instance)?`, "it is the disk itself"},
}

// removals calls visit for each field and each item below a part, while it is not there.
func removals(path string, part any, visit func(path string)) {
	if part, ok := part.(map[string]any); ok {
		for _, key := range slices.Sorted(maps.Keys(part)) {
			below, value := path+"/"+key, part[key]
			delete(part, key)
			visit(below)
			part[key] = value
			removals(below, value, visit)
			if items, ok := value.([]any); ok {
				for i, item := range items {
					part[key] = slices.Delete(slices.Clone(items), i, i+1)
					name := fmt.Sprint(i)
					if o, ok := item.(map[string]any); ok && o["metadata"] != nil {
						name = fmt.Sprint(o["kind"], ":", o["metadata"].(map[string]any)["name"])
					}
					visit(below + "/" + name)
					part[key] = value
					removals(below+"/"+name, item, visit)
				}
			}
		}
	}
}

// TestADoctorNamesWhatIsMissingInAHealthyChain removes each object and each field of a healthy
// chain, one at a time. The diagnosis has to report the link of that part, or an earlier link, as
// broken or unseen.
func TestADoctorNamesWhatIsMissingInAHealthyChain(t *testing.T) {
	var evidence map[string]any
	csitest.Must(t, json.Unmarshal([]byte(asJSON(t, healthy(t))), &evidence))
	removed, right, nothingFound, needless := 0, 0, 0, 0
	check := func(what string, want Link, says string, e Evidence) {
		d := Diagnose(e)
		named := namedLink(d)
		if right++; named == "" || at(named) > at(want) || !strings.Contains(text(d), says) {
			right--
			t.Errorf("without %s the doctor names %q, want %s or a link before it, and %q:\n%s", what, named,
				want, says, text(d))
		}
		if named == "" {
			nothingFound++
		}
	}
	used := map[string]bool{}
	judge := func(path string) {
		var e Evidence
		if err := json.Unmarshal([]byte(asJSON(t, evidence)), &e); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		removed++
		for _, part := range irrelevant {
			if regexp.MustCompile("^(" + part.parts + ")$").MatchString(path) {
				used[part.parts] = true
				needless++
				if named := namedLink(Diagnose(e)); named != "" {
					t.Errorf("%s: the doctor names %s, though the list calls the part irrelevant", path, named)
				}
				return
			}
		}
		for _, p := range partLinks {
			if regexp.MustCompile(p.pattern).MatchString(path) {
				check(path, p.link, "", e)
				return
			}
		}
		t.Errorf("no link has the part %s", path)
	}
	for _, part := range []string{"cluster", "nodes", "rack"} {
		for _, key := range slices.Sorted(maps.Keys(evidence[part].(map[string]any))) {
			whole := evidence[part].(map[string]any)
			only := map[string]any{key: whole[key]}
			removals("/"+part, only, func(path string) {
				if key == "unseen" || path == "/cluster/objects" {
					return // it may lack, or is every kind at once
				}
				rest := maps.Clone(whole)
				delete(rest, key)
				maps.Copy(rest, only)
				evidence[part] = rest
				judge(path)
			})
			evidence[part] = whole
		}
	}
	for _, part := range irrelevant {
		if !used[part.parts] {
			t.Errorf("no part of a healthy chain is %s (%s)", part.parts, part.why)
		}
	}
	for _, p := range processes {
		removed++
		check(p.name, p.link, p.says, *healthy(t, p.dies))
	}
	fmt.Printf("FIGURE doctor-removals removed=%d right=%d irrelevant=%d nothing_found=%d\n", removed,
		right, needless, nothingFound)
	if removed < 150 || right+needless != removed {
		t.Errorf("%d of %d removals were named, and %d are irrelevant", right, removed, needless)
	}
}

func namedLink(d Diagnosis) Link {
	for _, c := range d.Chains {
		for _, s := range c.Links {
			if s.State == Broken || s.State == Unseen {
				return s.Link
			}
		}
	}
	return ""
}

func at(l Link) int {
	return slices.IndexFunc(volumeLinks, func(j judgement) bool { return j.link == l })
}

// processes contains the processes of a chain. dies is what the evidence shows when a process has
// ended, and says what the report must contain: its name, or the command that shows its log.
var processes = []struct {
	name string
	dies edit
	link Link
	says string
}{
	{"csi-provisioner", all(unbound, dead(kindReplicaSet, "csi-provisioner")), LinkClaim,
		"-c csi-provisioner"},
	{"the provisioner's driver", all(unbound, dead(kindReplicaSet, "oxide-plugin")), LinkClaim,
		"-c oxide-plugin"},
	{"csi-attacher", all(notAttached(""), dead(kindReplicaSet, "csi-attacher")),
		LinkAttachment, "-c csi-attacher"},
	{"the attacher's driver", all(notAttached(""), dead(kindReplicaSet, "oxide-plugin")),
		LinkAttachment, "-c oxide-plugin"},
	{"the controller", all(notAttached(""), func(_ testing.TB, e *Evidence) {
		e.Nodes.DriverPods = e.Nodes.DriverPods[:1]
	}), LinkAttachment, "no pod of the driver's controller"},
	{"the node's driver", dead(kindDaemonSet, "oxide-plugin"), LinkNode, "-c oxide-plugin"},
	{"node-driver-registrar", dead(kindDaemonSet, "node-driver-registrar"), LinkNode,
		"-c node-driver-registrar"},
	{"node-driver-registrar, before it registered", all(dead(kindDaemonSet,
		"node-driver-registrar"), noDriver),
		LinkNode, "-c node-driver-registrar"},
	{"the kubelet", notReady, LinkNode, "kubectl describe node worker-1"},
	{"the machine", put("rack/instances/*/object/state", "stopped"), LinkInstance, "instance view"},
	{"the scheduler", unscheduled, LinkPod, "kubectl describe pod"},
}

// dead makes a container of the driver crash again and again.
func dead(controller, container string) edit {
	return func(t testing.TB, e *Evidence) {
		for i, pod := range e.Nodes.DriverPods {
			for k, s := range pod.Status.ContainerStatuses {
				if pod.Metadata.Controller().Kind == controller && s.Name == container {
					s.Ready, s.State.Running, s.State.Waiting.Reason = false, nil, "CrashLoopBackOff"
					e.Nodes.DriverPods[i].Status.ContainerStatuses[k] = s
					return
				}
			}
		}
		t.Fatalf("no pod of a %s has a container %s", controller, container)
	}
}
