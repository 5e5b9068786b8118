package claim

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

const (
	// planKey contains the plan, on the earlier PersistentVolume, and the id of the run that works on
	// it, on the earlier claim.
	planKey = "csi.oxide.computer/claim-plan"
	// changeKey names the change, on all that it makes and on the workload that it stops.
	changeKey = "csi.oxide.computer/claim-change"
	// replacesKey names the earlier PersistentVolume, on the new one.
	replacesKey = "csi.oxide.computer/claim-replaces"
	// earlierKey contains the handles of the earlier volumes, on the new claim.
	earlierKey = "csi.oxide.computer/claim-earlier-volumes"
)

// plan is what a change needs to know and can no longer read from the objects.
type plan struct {
	Verb      string `json:"verb"`
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	ClaimUID  string `json:"claimUID"`
	// NamespaceUID tells the namespace from one that is made again under its name.
	NamespaceUID string `json:"namespaceUID"`
	Manifest     object `json:"manifest"` // of the earlier claim, to make it again
	ID           string `json:"id"`       // of the change
	Run          string `json:"run"`      // that works on it

	OldSize string `json:"oldSize"`
	Size    string `json:"size"`
	Old     string `json:"old"` // the earlier PersistentVolume
	OldUID  string `json:"oldUID"`
	Handle  string `json:"handle"` // its disk
	Policy  string `json:"policy"` // its reclaim policy, which the new one gets

	ClassUID         string `json:"classUID"`
	Retains          bool   `json:"retains,omitempty"` // the class keeps the disks of deleted claims
	Node             string `json:"node,omitempty"`    // where a class waits for a pod's node
	SnapshotClass    string `json:"snapshotClass,omitempty"`
	SnapshotClassUID string `json:"snapshotClassUID,omitempty"`
	Shot             shot   `json:"shot"`
	Owner            owner  `json:"owner"`

	// Nodes contains the UIDs of the nodes that had the disk when the change began.
	Nodes map[string]string `json:"nodes,omitempty"`
	// Seen contains the last report of each node that had the disk when no pod used the claim any
	// more. Unmounted means that each of these nodes has reported since that the disk is unmounted.
	Seen      map[string]string `json:"seen,omitempty"`
	Unmounted bool              `json:"unmounted,omitempty"`

	TemporaryUID string `json:"temporaryUID,omitempty"`
	New          string `json:"new,omitempty"` // the new PersistentVolume, which has proven itself
	NewHandle    string `json:"newHandle,omitempty"`

	Handed   bool `json:"handed,omitempty"` // the claim may be made for the new PersistentVolume
	Bound    bool `json:"bound,omitempty"`  // the claim was seen bound to it
	Undo     bool `json:"undo,omitempty"`
	Finished bool `json:"finished,omitempty"`
}

// shot is the snapshot of which the new disk is made. If the change takes the snapshot, only its
// name is known until it is ready.
type shot struct {
	Name       string `json:"name"`
	UID        string `json:"uid,omitempty"`
	Content    string `json:"content,omitempty"`
	ContentUID string `json:"contentUID,omitempty"`
	Handle     string `json:"handle,omitempty"`
}

// owner is the object whose scale stops the workload.
type owner struct {
	Kind     string `json:"kind,omitempty"` // empty if nothing uses the claim
	Name     string `json:"name,omitempty"`
	UID      string `json:"uid,omitempty"`
	Person   bool   `json:"person,omitempty"` // only a person knows how to stop it
	Replicas int64  `json:"replicas,omitempty"`
	Target   int64  `json:"target"`        // of the scale while the workload is stopped
	Pod      string `json:"pod,omitempty"` // that uses the claim
}

func (o owner) String() string { return o.Kind + " " + o.Name }

// resource returns what kubectl calls the owner's kind, or "" if the command does not scale it.
func (o owner) resource() string {
	if o.Person || o.Kind != "Deployment" && o.Kind != "StatefulSet" {
		return ""
	}
	return kinds[o.Kind].resource
}

func (p plan) path() string { return p.Namespace + "/" + p.Claim }

func (p plan) mark() string { return p.path() + " " + p.ID }

// kept is the claim of the command's own that has the earlier disk, and temporary the one that has
// the new disk.
func (p plan) kept() string      { return shorten(p.Claim) + "-before-" + p.ID }
func (p plan) temporary() string { return shorten(p.Claim) + "-" + p.Verb + "-" + p.ID }

// shorten makes room for a suffix in a name of 253 bytes.
func shorten(name string) string { return strings.TrimRight(name[:min(len(name), 200)], "-.") }

// earlier returns the handles of all volumes that the claim has had.
func (p plan) earlier() []string {
	meta, _ := p.Manifest.at("metadata", "annotations").(map[string]any)
	text, _ := meta[earlierKey].(string)
	return slices.DeleteFunc(append(strings.Split(text, ","), p.Handle),
		func(h string) bool { return h == "" })
}

// planOf returns the plan on a PersistentVolume, or nil. Others may have written it, so it is an
// error unless it is for the claim that the volume had, and names only what the command may use.
func planOf(pv object) (*plan, error) {
	text := pv.annotation(planKey)
	if text == "" {
		return nil, nil
	}
	var p plan
	err := json.Unmarshal([]byte(text), &p)
	wrong := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return n != "" && !kube.IsName(n) })
	}
	switch {
	case err != nil:
	case p.Old != pv.name() || p.OldUID != pv.uid() || p.Handle != pv.str("spec", "csi",
		"volumeHandle") || pv.str("spec", "csi", "driver") != volume.DriverName ||
		p.Manifest.str("spec", "volumeName") != p.Old:
		err = fmt.Errorf("it is of PersistentVolume %.80q with the disk %.80q", p.Old, p.Handle)
	case p.Namespace != pv.str("spec", "claimRef", "namespace") ||
		p.Verb != Grow && p.Verb != Revert || p.ID == "" ||
		wrong(p.Namespace, p.Claim, p.ID, p.Shot.Name, p.Shot.Content, p.Node, p.New,
			p.TemporaryUID, strings.ToLower(p.Owner.Name)) ||
		!slices.Contains([]string{p.Claim, p.kept()}, pv.str("spec", "claimRef", "name")):
		err = fmt.Errorf("it is of another claim, or names what cannot be")
	}
	if err != nil {
		return &p, fmt.Errorf("the annotation %s of PersistentVolume %s is no plan of that volume (%w): "+
			"if nobody knows of a change of it, remove the annotation", planKey, pv.name(), err)
	}
	return &p, nil
}

// find finds the plan for the claim, or returns nil.
func (r *run) find(ctx context.Context) (pv object, p *plan, err error) {
	pvs, err := r.all(ctx, persistentVolumes, "")
	if err != nil {
		return nil, nil, err
	}
	for _, pv := range pvs {
		p, err := planOf(pv)
		ref := pv.str("spec", "claimRef", "namespace") + "/" + pv.str("spec", "claimRef", "name")
		switch of := r.Namespace + "/" + r.Claim; {
		case p == nil || p.path() != of && (err == nil || ref != of):
		case err != nil:
			return nil, nil, err
		default:
			return pv, p, nil
		}
	}
	return nil, nil, nil
}

// save writes the plan, and further fields of the PersistentVolume with it.
func (r *run) save(ctx context.Context, pv object, p plan, spec object) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return r.patch(ctx, pv, annotate(planKey, string(text), spec))
}

// bindingKeys are the annotations that Kubernetes sets when it binds a claim, and planKey.
var bindingKeys = []string{"pv.kubernetes.io/bind-completed",
	"pv.kubernetes.io/bound-by-controller", "volume.kubernetes.io/storage-provisioner",
	"volume.beta.kubernetes.io/storage-provisioner",
	selectedNode, planKey}

// selectedNode is the annotation with which a scheduler asks for a volume near a node.
const selectedNode = "volume.kubernetes.io/selected-node"

// again returns the claim with its earlier labels, annotations and owners, and with further
// annotations.
func (p plan) again(spec object, more map[string]any) object {
	meta, kept := object{"name": p.Claim, "namespace": p.Namespace}, map[string]any{}
	for _, key := range []string{"labels", "ownerReferences"} {
		if value := p.Manifest.at("metadata", key); value != nil {
			meta[key] = value
		}
	}
	all, _ := p.Manifest.at("metadata", "annotations").(map[string]any)
	for key, value := range all {
		if !slices.Contains(bindingKeys, key) {
			kept[key] = value
		}
	}
	maps.Copy(kept, more)
	meta["annotations"] = kept
	return object{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
}

func (p plan) newClaim(pv string) object {
	return p.again(p.spec(p.Size, object{"volumeName": pv}),
		map[string]any{earlierKey: strings.Join(p.earlier(), ",")})
}

func (p plan) own(name string, spec object, more map[string]any) object {
	marks := map[string]any{changeKey: p.mark()}
	maps.Copy(marks, more)
	return object{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec,
		"metadata": object{"name": name, "namespace": p.Namespace, "annotations": marks}}
}

func (p plan) spec(size string, more object) object {
	s := object{"resources": object{"requests": object{"storage": size}}}
	for _, key := range []string{"accessModes", "storageClassName", "volumeMode"} {
		if value := p.Manifest.at("spec", key); value != nil {
			s[key] = value
		}
	}
	maps.Copy(s, more)
	return s
}

func (p plan) keptClaim() object {
	return p.own(p.kept(), p.spec(p.OldSize, object{"volumeName": p.Old}), nil)
}

// temporaryClaim returns the claim for which the new disk is made from the snapshot.
func (p plan) temporaryClaim() object {
	more := map[string]any{}
	if p.Node != "" {
		more[selectedNode] = p.Node
	}
	source := object{"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot",
		"name": p.Shot.Name}
	return p.own(p.temporary(), p.spec(p.Size, object{"dataSource": source}), more)
}

func (p plan) ownSnapshot() object {
	return object{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
		"metadata": object{"name": p.Shot.Name, "namespace": p.Namespace,
			"annotations": map[string]any{changeKey: p.mark()}},
		"spec": object{"volumeSnapshotClassName": p.SnapshotClass,
			"source": object{"persistentVolumeClaimName": p.kept()}}}
}

// ownedBy gives an object an owner, so that Kubernetes deletes the object with its owner, even if
// the request that creates it arrives after the change was undone.
func ownedBy(o, owner object) object {
	meta, _ := o["metadata"].(object)
	meta["ownerReferences"] = []any{object{"apiVersion": "v1", "kind": owner.str("kind"),
		"name": owner.name(), "uid": owner.uid()}}
	return o
}
