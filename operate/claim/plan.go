package claim

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// The annotations that record a change.
const (
	// planKey has the plan, on the earlier PersistentVolume, and the id of the run that works on it,
	// on the earlier claim.
	planKey = "csi.oxide.computer/claim-plan"
	// replacesKey names the earlier PersistentVolume, on the new one.
	replacesKey = "csi.oxide.computer/claim-replaces"
	// earlierKey has the handles of the earlier volumes, on the new claim.
	earlierKey = "csi.oxide.computer/claim-earlier-volumes"
)

// plan is all that a change needs to know and cannot read from the objects any more.
type plan struct {
	Verb      string `json:"verb"`
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	ClaimUID  string `json:"claimUID"`
	Manifest  object `json:"manifest"` // of the earlier claim, to make it again

	OldSize string `json:"oldSize"`
	Size    string `json:"size"`
	Old     string `json:"old"`    // the earlier PersistentVolume
	Handle  string `json:"handle"` // its disk
	Policy  string `json:"policy"` // its reclaim policy, which the new one gets

	Snapshot      string `json:"snapshot"`
	SnapshotClass string `json:"snapshotClass,omitempty"` // if the snapshot is the change's own
	Temporary     string `json:"temporary"`               // the claim for which the new disk is made
	Node          string `json:"node,omitempty"`          // where a class waits for a pod's node
	Owner         owner  `json:"owner"`

	// Stopped reports that the workload was stopped and the disk unmounted when the owner had this
	// generation.
	Stopped    bool  `json:"stopped,omitempty"`
	Generation int64 `json:"generation,omitempty"`

	New          string `json:"new,omitempty"` // the new PersistentVolume
	TemporaryUID string `json:"temporaryUID,omitempty"`

	// Retains reports that the class keeps the disks of deleted claims.
	Retains bool `json:"retains,omitempty"`
	// Late has the UIDs of temporary claims that were deleted while the provisioner may have been
	// making their disks, and LateSince is when the change was undone after that.
	Late      []string  `json:"late,omitempty"`
	LateSince time.Time `json:"lateSince,omitzero"`

	// Started reports that the point of no return has been passed: the claim is about to be made, or
	// was made, for the new disk.
	Started bool `json:"started,omitempty"`

	Run      string `json:"run"`
	Undo     bool   `json:"undo,omitempty"`
	Undone   bool   `json:"undone,omitempty"` // only late disks are left of the change
	Finished bool   `json:"finished,omitempty"`
}

// owner is the object whose scale stops the workload.
type owner struct {
	Kind     string `json:"kind,omitempty"` // empty if nothing uses the claim
	Name     string `json:"name,omitempty"`
	UID      string `json:"uid,omitempty"`
	Resource string `json:"resource,omitempty"` // empty if a person has to stop the workload
	Replicas int64  `json:"replicas,omitempty"`
	Target   int64  `json:"target"`        // of the scale while the workload is stopped
	Pod      string `json:"pod,omitempty"` // that uses the claim
}

func (o owner) String() string { return o.Kind + " " + o.Name }

// view is the state of all objects of a change.
type view struct {
	plan                                         *plan
	old, fresh, claim, temporary, shot, workload object
	users                                        []object
	late                                         []object // PersistentVolumes of late disks
	// foreign is the PersistentVolume that was bound to the temporary claim without having been made
	// for it.
	foreign object
}

// look reads the objects of a change. It fails if another run of the command has taken over.
func (r *run) look(ctx context.Context) (v view, err error) {
	if v.old, err = r.get(ctx, persistentVolumes, "", r.old); err != nil || v.old == nil {
		return v, err
	}
	if v.plan, err = planOf(v.old); err != nil || v.plan == nil {
		return v, err
	}
	p := v.plan
	if p.Run != r.id {
		return v, fmt.Errorf("another run of this command has taken over the change of %s/%s",
			p.Namespace, p.Claim)
	}
	for _, o := range []struct {
		into                      *object
		resource, namespace, name string
	}{
		{&v.claim, claims, p.Namespace, p.Claim},
		{&v.temporary, claims, p.Namespace, p.Temporary},
		{&v.shot, snapshots, p.Namespace, p.Snapshot},
	} {
		if *o.into, err = r.get(ctx, o.resource, o.namespace, o.name); err != nil {
			return v, err
		}
	}
	if err := r.lookAtDisks(ctx, &v); err != nil {
		return v, err
	}
	if p.Owner.Resource != "" {
		if v.workload, err = r.get(ctx, p.Owner.Resource, p.Namespace, p.Owner.Name); err != nil {
			return v, err
		}
	}
	pods, err := r.all(ctx, "pods", p.Namespace)
	v.users = users(pods, p.Claim)
	return v, err
}

// lookAtDisks reads the PersistentVolumes that were made for the change.
func (r *run) lookAtDisks(ctx context.Context, v *view) (err error) {
	p, named, uid := v.plan, v.temporary.str("spec", "volumeName"), v.plan.TemporaryUID
	if v.temporary != nil {
		uid = v.temporary.uid()
	}
	fresh := p.New
	if fresh == "" {
		fresh = named
	}
	if fresh == "" && uid != "" {
		fresh = volumeOf(uid)
	}
	if v.fresh, err = r.get(ctx, persistentVolumes, "", fresh); err != nil {
		return err
	}
	if p.New == "" && v.fresh != nil && !madeFor(v.fresh, uid) {
		if named != "" {
			v.foreign = v.fresh
		}
		v.fresh = nil
	}
	for _, uid := range p.Late {
		pv, err := r.get(ctx, persistentVolumes, "", volumeOf(uid))
		if err != nil {
			return err
		}
		if pv != nil && madeFor(pv, uid) {
			v.late = append(v.late, pv)
		}
	}
	return nil
}

// volumeOf returns the name that the provisioner gives to the PersistentVolume of a claim.
func volumeOf(claimUID string) string { return "pvc-" + claimUID }

// madeFor reports whether the provisioner made a PersistentVolume for a claim. Kubernetes may bind
// a claim to one that was there before, which ignores the snapshot, and whoever may change the
// claim may name one.
func madeFor(pv object, claimUID string) bool {
	return pv.name() == volumeOf(claimUID) && pv.str("spec", "claimRef", "uid") == claimUID
}

// planOf returns the plan on a PersistentVolume, or nil.
func planOf(pv object) (*plan, error) {
	text := pv.annotation(planKey)
	if text == "" {
		return nil, nil
	}
	var p plan
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return nil, fmt.Errorf("the annotation %s of PersistentVolume %s is not a plan: %w", planKey,
			pv.name(), err)
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
		if err != nil && pv.str("spec", "claimRef", "namespace") == r.Namespace &&
			pv.str("spec", "claimRef", "name") == r.Claim {
			return nil, nil, err
		}
		if p != nil && p.Namespace == r.Namespace && p.Claim == r.Claim {
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
	change := object{"metadata": annotations(map[string]any{planKey: string(text)})}
	if spec != nil {
		change["spec"] = spec
	}
	return r.patch(ctx, pv, change)
}

// passed reports whether the point of no return has been passed. It stays so if the claim is
// deleted afterwards: the new disk may have been written.
func (v view) passed() bool { return v.plan.Started || v.replaced() }

// replaced reports whether the claim has the new disk.
func (v view) replaced() bool {
	return v.claim != nil && v.fresh != nil && v.claim.str("spec", "volumeName") == v.fresh.name()
}

// original reports whether the claim is the earlier one.
func (v view) original() bool { return v.claim != nil && v.claim.uid() == v.plan.ClaimUID }

// guard refuses to go on if the new disk is gone, or if the workload may have written after it was
// stopped.
func (v view) guard() error {
	switch p := v.plan; {
	case p.New != "" && v.fresh == nil:
		return fmt.Errorf("PersistentVolume %s is gone, and the new disk may be gone with it; repeat "+
			"the command with --undo", p.New)
	case v.claim != nil && !v.original():
		return fmt.Errorf("another PersistentVolumeClaim %s/%s has been made meanwhile; if it holds "+
			"nothing, delete it, and repeat the command", p.Namespace, p.Claim)
	case v.original() && len(v.users) > 0:
		return fmt.Errorf("the workload was started again (pod %s), and the new disk would lack what "+
			"it writes; repeat the command with --undo", names(v.users))
	case p.Owner.Resource != "" && (v.workload.uid() != p.Owner.UID ||
		v.workload.num("metadata", "generation") != p.Generation):
		return fmt.Errorf("%s was changed, deleted or made again after it was stopped, so it may have "+
			"run, and the new disk would lack what it wrote; repeat the command with --undo", p.Owner)
	}
	return nil
}

// claimOf returns the claim with its earlier labels, annotations and owners.
func (p plan) claimOf(name string, spec object, more map[string]any) object {
	meta := object{"name": name, "namespace": p.Namespace}
	kept := map[string]any{}
	if name == p.Claim {
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
	}
	for key, value := range more {
		kept[key] = value
	}
	meta["annotations"] = kept
	return object{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
}

// bindingKeys are the annotations that Kubernetes sets when it binds a claim, and planKey.
var bindingKeys = []string{"pv.kubernetes.io/bind-completed",
	"pv.kubernetes.io/bound-by-controller", "volume.kubernetes.io/storage-provisioner",
	"volume.beta.kubernetes.io/storage-provisioner",
	selectedNode, planKey}

// selectedNode is the annotation with which a scheduler asks for a volume near a node.
const selectedNode = "volume.kubernetes.io/selected-node"

// spec returns the spec of a new claim.
func (p plan) spec(more object) object {
	s := object{"resources": object{"requests": object{"storage": p.Size}}}
	for _, key := range []string{"accessModes", "storageClassName", "volumeMode"} {
		if value := p.Manifest.at("spec", key); value != nil {
			s[key] = value
		}
	}
	for key, value := range more {
		s[key] = value
	}
	return s
}

// temporaryClaim returns the claim for which the new disk is made from the snapshot.
func (p plan) temporaryClaim() object {
	more := map[string]any{planKey: p.Old}
	if p.Node != "" {
		more[selectedNode] = p.Node
	}
	return p.claimOf(p.Temporary, p.spec(object{"dataSource": object{
		"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": p.Snapshot}}), more)
}
