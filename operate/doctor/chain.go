package doctor

import (
	"cmp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// chain contains the objects that belong to one volume. If the claim is nil, claimWhy is the reason
// why it could not be read, or "" if it does not exist. The same holds for the other objects.
type chain struct {
	*Evidence
	subject string
	links   []judgement

	claimName     kube.Reference // namespace and name, even if the claim was not found
	claim         *kube.Object
	claimWhy      string
	volume        *kube.Object
	volumeWhy     string
	attachments   []kube.Object
	attachment    *kube.Object // the VolumeAttachment to judge; see mainAttachment
	attachmentWhy string
	pods          []kube.Object // users of the claim that have not ended, or are being deleted
	podsWhy       string
	pod           *kube.Object // the pod to judge; see mainPod

	handle string // the volume's id, which is also the disk's id
	node   node   // the node that has or needs the volume
}

// node is a node of the cluster, which is an instance of the rack.
type node struct {
	*Evidence
	name     string
	csiNode  *kube.Object
	why      string // why the name or the CSINode is not known, or ""
	instance string // the instance's id
}

type judgement struct {
	link  Link
	judge func(*chain) Step
}

var (
	volumeLinks = []judgement{{LinkClaim, (*chain).judgeClaim}, {LinkVolume, (*chain).judgeVolume},
		{LinkAttachment, (*chain).judgeAttachment}, {LinkNode, ofNode(node.judge)},
		{LinkRack, (*chain).judgeRack}, {LinkInstance, ofNode(node.judgeInstance)},
		{LinkDisk, (*chain).judgeDisk}, {LinkSerial, (*chain).judgeSerial},
		{LinkDevice, onNode("the device", inspection.PartDevices, nodeView.judgeDevice)},
		{LinkFilesystem, onNode("the filesystem", inspection.PartFilesystem, nodeView.judgeFilesystem)},
		{LinkMounts, onNode("the mounts", inspection.PartMounts, nodeView.judgeMounts)},
		{LinkPod, (*chain).judgePod}}
	machineLinks = volumeLinks[3:6] // node, rack and instance
)

func ofNode(judge func(node) Step) func(*chain) Step {
	return func(c *chain) Step {
		n := c.node // its Evidence is nil if the chain has no node
		n.Evidence = c.Evidence
		return judge(n)
	}
}

func resolve(e *Evidence) []*chain {
	switch q := e.Question; q.Kind {
	case AskClaim:
		return []*chain{claimChain(e, q.Namespace, q.Name, nil)}
	case AskVolume:
		return []*chain{volumeChain(e, q.Name)}
	case AskPod:
		return podChains(e, q.Namespace, q.Name)
	case AskNode:
		return nodeChains(e, q.Name)
	case AskCluster:
		return allChains(e)
	}
	return []*chain{{Evidence: e, subject: "rack", links: []judgement{{LinkRack,
		(*chain).judgeRackItself}, {LinkDisk, (*chain).judgeOwnDisks}}}}
}

// claimChain returns the chain of a claim. If pod is nil, complete() chooses one.
func claimChain(e *Evidence, namespace, name string, pod *kube.Object) *chain {
	c := &chain{Evidence: e, subject: "claim " + namespace + "/" + name, links: volumeLinks, pod: pod,
		claimName: kube.Reference{Namespace: namespace, Name: name}}
	c.claim, c.claimWhy = e.Cluster.one(kindClaim, named(namespace, name))
	if c.claim != nil && c.claim.Spec.VolumeName != "" {
		c.findVolume(named("", c.claim.Spec.VolumeName))
	} else if c.claim == nil {
		c.volumeWhy = c.claimWhy
	}
	c.complete()
	return c
}

func volumeChain(e *Evidence, id string) *chain {
	c := &chain{Evidence: e, subject: "volume " + id, links: volumeLinks, handle: id}
	return c.from(func(o *kube.Object) bool {
		handle, ok := volume.ParseID(o.Spec.CSI.VolumeHandle)
		return ok && handle == id && o.Spec.CSI.Driver == volume.DriverName
	})
}

func (c *chain) from(match func(*kube.Object) bool) *chain {
	c.findVolume(match)
	if c.volume != nil {
		c.claimName = c.volume.Spec.ClaimRef
	}
	c.claimWhy = c.volumeWhy
	if c.claimName.Name != "" {
		c.claim, c.claimWhy = c.Cluster.one(kindClaim, named(c.claimName.Namespace, c.claimName.Name))
	}
	c.complete()
	return c
}

// podChains returns a chain for each claim of the pod or, without a claim, one for the pod itself.
func podChains(e *Evidence, namespace, name string) []*chain {
	pod, why := e.Cluster.one(kindPod, named(namespace, name))
	alone := &chain{Evidence: e, subject: "pod " + namespace + "/" + name, pod: pod, podsWhy: why,
		links: []judgement{{LinkPod, (*chain).judgePod}}}
	var chains []*chain
	for _, v := range cmp.Or(pod, &none).Spec.Volumes {
		if claim := claimOf(pod, v); claim != "" {
			c := claimChain(e, namespace, claim, pod)
			c.subject = alone.subject + ", volume " + v.Name + ", claim " + claim
			chains = append(chains, c)
		}
	}
	if len(chains) == 0 {
		return []*chain{alone}
	}
	return chains
}

// nodeChains returns a chain of the node, and a chain for each volume that is attached to the node.
func nodeChains(e *Evidence, name string) []*chain {
	own := &chain{Evidence: e, subject: "node " + name, node: findNode(e, name, "", ""),
		links: slices.Concat(machineLinks, []judgement{{LinkDevice, ofNode(node.judgeDevices)}})}
	chains := []*chain{own}
	attached, why := e.Cluster.objects(kindAttachment, func(o *kube.Object) bool {
		return o.Spec.NodeName == name && o.Spec.Attacher == volume.DriverName
	})
	if why != "" {
		own.links = append(own.links, judgement{LinkAttachment, (*chain).judgeAttachment})
		own.attachmentWhy = why
	}
	for _, a := range attached {
		chains = append(chains, persistentChain(e, a.Spec.Source.PersistentVolumeName))
	}
	return chains
}

func persistentChain(e *Evidence, name string) *chain {
	c := &chain{Evidence: e, subject: "PersistentVolume " + name, links: volumeLinks}
	return c.from(named("", name))
}

// allChains returns a chain for the rack, for each node with the driver, for each PersistentVolume
// of the driver, and for each claim and each disk that has no PersistentVolume.
func allChains(e *Evidence) []*chain {
	chains := []*chain{{Evidence: e, subject: "rack", links: []judgement{{LinkRack,
		(*chain).judgeRack}}}}
	var nodes, volumes, claims []*chain
	disks := map[string]bool{}
	for _, o := range e.Cluster.Objects {
		name := o.Metadata.Name
		switch {
		case o.Kind == kindCSINode && nodeDriver(&o) != nil:
			nodes = append(nodes, &chain{Evidence: e, subject: "node " + name, links: []judgement{
				{LinkNode, ofNode(node.judge)}, {LinkInstance, ofNode(node.judgeInstance)}},
				node: findNode(e, name, "", "")})
		case o.Kind == kindVolume && o.Spec.CSI.Driver == volume.DriverName:
			c := persistentChain(e, name)
			disks[c.handle] = true
			volumes = append(volumes, c)
		case o.Kind == kindClaim && o.Spec.VolumeName == "" &&
			o.Metadata.Annotations.Provisioner == volume.DriverName:
			claims = append(claims, claimChain(e, o.Metadata.Namespace, name, nil))
		}
	}
	chains = slices.Concat(chains, nodes, volumes, claims)
	for _, id := range sortedKeys(e.Rack.Disks) {
		if e.Rack.Disks[id].Object != nil && !disks[id] {
			c := volumeChain(e, id)
			c.links = []judgement{{LinkVolume, (*chain).judgeVolume}, {LinkDisk, (*chain).judgeDisk}}
			chains = append(chains, c)
		}
	}
	return chains
}

func claimOf(pod *kube.Object, v kube.PodVolume) string {
	if v.Ephemeral != nil {
		return pod.Metadata.Name + "-" + v.Name
	}
	return v.PersistentVolumeClaim.ClaimName
}

// snapshots() returns the VolumeSnapshotContents of the volume's snapshots and of the snapshot from
// which the claim is to be provisioned.
func (c *chain) snapshots() []kube.Object {
	found, _ := c.Cluster.objects(kindContent, func(o *kube.Object) bool {
		id, ok := volume.ParseID(o.Spec.Source.VolumeHandle)
		ref, from := o.Spec.VolumeSnapshotRef, kube.Reference{}
		if c.claim != nil && c.claim.Status.Phase != phaseBound {
			from = c.claim.Spec.DataSource
		}
		return o.Spec.Driver == volume.DriverName && (ok && id == c.handle ||
			from.Kind == "VolumeSnapshot" && ref.Name == from.Name && ref.Namespace == c.claimName.Namespace)
	})
	return found
}

func (c *chain) findVolume(match func(*kube.Object) bool) {
	c.volume, c.volumeWhy = c.Cluster.one(kindVolume, match)
	if c.volume == nil || c.volume.Spec.CSI.Driver != volume.DriverName {
		return
	}
	c.handle = c.volume.Spec.CSI.VolumeHandle
	if id, ok := volume.ParseID(c.handle); ok {
		c.handle = id
	}
}

// complete() finds the pods, the VolumeAttachments and the node of the claim and the volume.
func (c *chain) complete() {
	if c.claimName.Name != "" {
		c.pods, c.podsWhy = c.Cluster.objects(kindPod, func(o *kube.Object) bool {
			return o.Metadata.Namespace == c.claimName.Namespace &&
				(!ended(*o) || !o.Metadata.DeletionTimestamp.IsZero()) &&
				slices.ContainsFunc(o.Spec.Volumes, func(v kube.PodVolume) bool {
					return claimOf(o, v) == c.claimName.Name
				})
		})
	} else {
		c.podsWhy = cmp.Or(c.claimWhy, c.volumeWhy)
	}
	if c.pod == nil {
		c.pod = mainPod(c.pods)
	}
	if c.volume != nil {
		c.attachments, c.attachmentWhy = c.Cluster.objects(kindAttachment, func(o *kube.Object) bool {
			return o.Spec.Source.PersistentVolumeName == c.volume.Metadata.Name &&
				o.Spec.Attacher == volume.DriverName
		})
	} else {
		c.attachmentWhy = c.volumeWhy
	}
	c.attachment = mainAttachment(c.attachments, c.pod)
	name := cmp.Or(c.attachment, c.pod, &none).Spec.NodeName
	c.node = findNode(c.Evidence, name, cmp.Or(c.attachmentWhy, c.podsWhy), c.handle)
}

// mainPod returns the pod to judge: one that waits, else one that runs, else any, else nil.
func mainPod(pods []kube.Object) (best *kube.Object) {
	for i, pod := range pods {
		if best == nil || ended(*best) && !ended(pod) ||
			best.Status.Phase == phaseRunning && pod.Status.Phase != phaseRunning && !ended(pod) {
			best = &pods[i]
		}
	}
	return best
}

// mainAttachment returns the VolumeAttachment to judge: the one of the pod's node. If the pod is on
// no node, or is nil, it prefers a VolumeAttachment that is not being deleted.
func mainAttachment(attachments []kube.Object, pod *kube.Object) *kube.Object {
	var best *kube.Object
	scheduled := pod != nil && pod.Spec.NodeName != ""
	for i, a := range attachments {
		switch {
		case scheduled && pod.Spec.NodeName == a.Spec.NodeName:
			return &attachments[i]
		case scheduled:
		case best == nil, !best.Metadata.DeletionTimestamp.IsZero() &&
			a.Metadata.DeletionTimestamp.IsZero():
			best = &attachments[i]
		}
	}
	return best
}

// findNode finds the driver's entry in the CSINode, which names the instance. If the name is "" or
// the CSINode could not be read, it uses the instance to which the rack has attached the disk.
func findNode(e *Evidence, name, why, disk string) node {
	n := node{Evidence: e, name: name, why: why}
	if name != "" {
		n.csiNode, n.why = e.Cluster.one(kindCSINode, named("", name))
		if d := nodeDriver(n.csiNode); d != nil {
			n.instance = strings.ToLower(d.NodeID)
		}
	}
	if n.instance == "" && (name == "" || n.why != "") {
		if d := e.Rack.Disks[disk].Object; d != nil {
			n.instance = d.Instance
		}
	}
	return n
}

func nodeDriver(csiNode *kube.Object) *kube.NodeDriver {
	for _, d := range cmp.Or(csiNode, &none).Spec.Drivers {
		if d.Name == volume.DriverName {
			return &d
		}
	}
	return nil
}

// report returns an instance's report, or why there is none. For "" it returns the only report.
func (n Nodes) report(instance string) (r *inspection.Report, why string) {
	for id, r := range n.Reports {
		if id == instance || instance == "" && len(n.Reports) == 1 {
			return &r, ""
		}
	}
	return nil, cmp.Or(n.Unseen[instance], n.Unseen[""], "it is not known which node to ask")
}

func (c *chain) diskName() string {
	if disk := c.Rack.Disks[c.handle].Object; disk != nil {
		return disk.Name
	}
	return cmp.Or(c.volume, &none).Spec.CSI.VolumeAttributes.DiskName
}

func (n Nodes) driverPods(controller string) (pods []kube.Object) {
	for _, pod := range n.DriverPods {
		if pod.Kind == kindPod && pod.Metadata.Controller().Kind == controller {
			pods = append(pods, pod)
		}
	}
	return pods
}

func (n Nodes) driverPod(node string) *kube.Object {
	for _, pod := range n.driverPods(kindDaemonSet) {
		if pod.Spec.NodeName == node {
			return &pod
		}
	}
	return nil
}

// none stands for an object that does not exist or could not be read.
var none kube.Object

// names() returns the values of a command's placeholders. at is the node that the command is about.
func (c *chain) names(at node) map[string]string {
	names := map[string]string{"claim": c.claimName.Name, "volume": c.handle,
		"namespace": cmp.Or(c.claimName.Namespace, c.Question.Namespace), "disk": c.diskName(),
		"node": at.name, "instance": at.instance, "driverNamespace": c.Nodes.Namespace,
		"class": cmp.Or(c.claim, &none).Spec.StorageClassName,
		"pv":    cmp.Or(c.volume, &none).Metadata.Name, "pod": cmp.Or(c.pod, &none).Metadata.Name,
		"attachment": cmp.Or(c.attachment, &none).Metadata.Name,
		"driverPod":  cmp.Or(c.Nodes.driverPod(at.name), &none).Metadata.Name}
	if c.pod != nil {
		names["namespace"] = c.pod.Metadata.Namespace
	}
	return names
}
