package claim

import (
	"cmp"
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
	// On the earlier PersistentVolume, planKey contains the plan. On the earlier claim, it contains
	// the id of the run that works on the change.
	planKey = "csi.oxide.computer/claim-plan"
	// changeKey contains the id of the change. It is on each object that the command creates, and on
	// the workload that it stops.
	changeKey = "csi.oxide.computer/claim-change"
	// replacesKey, on the new PersistentVolume, names the earlier one.
	replacesKey = "csi.oxide.computer/claim-replaces"
	// earlierKey, on the new claim, lists the handles of the earlier volumes.
	earlierKey = "csi.oxide.computer/claim-earlier-volumes"
)

// plan describes a change. It also contains earlier values that the changed objects no longer have.
type plan struct {
	Verb      string `json:"verb"`
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	ClaimUID  string `json:"claimUID"`
	// NamespaceUID shows whether the namespace was deleted and created again.
	NamespaceUID string `json:"namespaceUID"`
	Manifest     object `json:"manifest"` // the earlier claim, to create it again
	ID           string `json:"id"`       // the id of the change
	Run          string `json:"run"`      // the id of the run that works on it

	OldSize string `json:"oldSize"`
	Size    string `json:"size"`
	Old     string `json:"old"` // the earlier PersistentVolume
	OldUID  string `json:"oldUID"`
	Handle  string `json:"handle"` // the earlier disk
	Policy  string `json:"policy"` // the earlier volume's reclaim policy, which the new volume gets

	ClassUID         string `json:"classUID"`
	Retains          bool   `json:"retains,omitempty"` // the class keeps the disks of deleted claims
	Node             string `json:"node,omitempty"`    // the node near which the class makes the disk
	SnapshotClass    string `json:"snapshotClass,omitempty"`
	SnapshotClassUID string `json:"snapshotClassUID,omitempty"`
	Shot             shot   `json:"shot"`
	Owner            owner  `json:"owner"`

	// Nodes are the nodes that had the disk when the change began. Keys: names; values: UIDs.
	Nodes map[string]string `json:"nodes,omitempty"`
	// Seen describes each node that has the disk, by name: its UID, and the time of its last report
	// before the command waited for the unmount. Unmounted is set when each of these nodes has since
	// reported the unmount, or the disk is detached from the node.
	Seen      map[string]string `json:"seen,omitempty"`
	Unmounted bool              `json:"unmounted,omitempty"`

	TemporaryUID string `json:"temporaryUID,omitempty"`
	New          string `json:"new,omitempty"` // the new PersistentVolume, once it has been checked
	NewHandle    string `json:"newHandle,omitempty"`

	Handed   bool `json:"handed,omitempty"` // the user's claim may have been created for New
	Bound    bool `json:"bound,omitempty"`  // the claim was seen bound to New
	Undo     bool `json:"undo,omitempty"`
	Finished bool `json:"finished,omitempty"`
}

// shot is the snapshot from which the new disk is made. If the command takes the snapshot, only the
// name is known until the snapshot is ready.
type shot struct {
	Name       string `json:"name"`
	UID        string `json:"uid,omitempty"`
	Content    string `json:"content,omitempty"`
	ContentUID string `json:"contentUID,omitempty"`
	Handle     string `json:"handle,omitempty"`
}

// owner is the Deployment, StatefulSet or other object that controls the pods.
type owner struct {
	Kind     string `json:"kind,omitempty"` // empty if nothing uses the claim
	Name     string `json:"name,omitempty"`
	UID      string `json:"uid,omitempty"`
	Person   bool   `json:"person,omitempty"` // only a person knows how to stop it
	Replicas int64  `json:"replicas,omitempty"`
	Target   int64  `json:"target"`        // the replicas while the workload is stopped
	Pod      string `json:"pod,omitempty"` // a pod that uses the claim
}

func (o owner) String() string { return o.Kind + " " + o.Name }

// resource returns kubectl's name of the owner's kind, or "" if the command cannot scale the owner.
func (o owner) resource() string {
	if o.Person || o.Kind != "Deployment" && o.Kind != "StatefulSet" {
		return ""
	}
	return kinds[o.Kind].resource
}

func (p plan) path() string { return p.Namespace + "/" + p.Claim }

func (p plan) mark() string { return p.path() + " " + p.ID }

// The command creates two claims for itself. kept() returns the name of the claim for the earlier
// disk, and temporary() that of the claim for the new disk.
func (p plan) kept() string      { return shorten(p.Claim) + "-before-" + p.ID }
func (p plan) temporary() string { return shorten(p.Claim) + "-" + p.Verb + "-" + p.ID }

// shorten cuts a name, so that the name and a suffix have at most 253 bytes.
func shorten(name string) string { return strings.TrimRight(name[:min(len(name), 200)], "-.") }

// earlier() returns the handles of all volumes that the claim has had so far.
func (p plan) earlier() []string {
	return slices.DeleteFunc(append(strings.Split(p.Manifest.annotation(earlierKey), ","), p.Handle),
		func(h string) bool { return h == "" })
}

// planOf returns the plan in a PersistentVolume's annotation, or nil. Anybody may have written the
// annotation, so planOf checks that the plan is for this volume and its claim, and has valid names.
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
		err = fmt.Errorf("it is of another claim, or contains an invalid name")
	}
	if err != nil {
		return &p, fmt.Errorf("the annotation %s of PersistentVolume %s is no plan of that volume (%w): "+
			"if nobody knows of a change of it, remove the annotation", planKey, pv.name(), err)
	}
	return &p, nil
}

// find returns the claim's plan and the PersistentVolume that contains the plan, or nil for both.
func (r *run) find(ctx context.Context) (pv object, p *plan, err error) {
	pvs, err := r.Kubectl.all(ctx, persistentVolumes, "")
	if err != nil {
		return nil, nil, err
	}
	for _, pv := range pvs {
		p, err := planOf(pv)
		ref := pv.str("spec", "claimRef", "namespace") + "/" + pv.str("spec", "claimRef", "name")
		of := r.Namespace + "/" + r.Claim
		if p != nil && (p.path() == of || err != nil && ref == of) {
			return pv, p, err
		}
	}
	return nil, nil, nil
}

// save writes the plan into an annotation of pv. The same patch sets the given fields of pv's spec.
func (k Kubectl) save(ctx context.Context, pv object, p plan, spec object) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return k.patch(ctx, pv, annotate(planKey, string(text), spec))
}

// bindingKeys are annotations of Kubernetes and of the command that a recreated claim does not get.
var bindingKeys = []string{"pv.kubernetes.io/bind-completed",
	"pv.kubernetes.io/bound-by-controller", "volume.kubernetes.io/storage-provisioner",
	"volume.beta.kubernetes.io/storage-provisioner", selectedNode, planKey}

// selectedNode is the annotation in which the scheduler names the node near which to make a disk.
const selectedNode = "volume.kubernetes.io/selected-node"

// again() returns a claim like the earlier one, with the given spec and further annotations.
func (p plan) again(spec object, more map[string]any) object {
	meta, kept := object{"name": p.Claim, "namespace": p.Namespace}, map[string]any{}
	p.Manifest.copyFields(meta, "metadata", "labels", "ownerReferences")
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

// own() returns a claim for the command itself. If a node is given, the disk is made near the node.
func (p plan) own(name string, spec object, node string) object {
	marks := map[string]any{changeKey: p.mark()}
	if node != "" {
		marks[selectedNode] = node
	}
	return object{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec,
		"metadata": object{"name": name, "namespace": p.Namespace, "annotations": marks}}
}

func (p plan) spec(size string, more object) object {
	s := object{"resources": object{"requests": object{"storage": size}}}
	p.Manifest.copyFields(s, "spec", "accessModes", "storageClassName", "volumeMode")
	maps.Copy(s, more)
	return s
}

func (p plan) keptClaim() object {
	return p.own(p.kept(), p.spec(p.OldSize, object{"volumeName": p.Old}), "")
}

func (p plan) temporaryClaim() object {
	source := object{"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot",
		"name": p.Shot.Name}
	return p.own(p.temporary(), p.spec(p.Size, object{"dataSource": source}), p.Node)
}

func (p plan) ownSnapshot() object {
	return object{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
		"metadata": object{"name": p.Shot.Name, "namespace": p.Namespace,
			"annotations": map[string]any{changeKey: p.mark()}},
		"spec": object{"volumeSnapshotClassName": p.SnapshotClass,
			"source": object{"persistentVolumeClaimName": p.kept()}}}
}

// ownedBy sets an object's owner. If the request that creates the object arrives after the change
// was undone, the owner is gone, and Kubernetes deletes the object.
func ownedBy(o, owner object) object {
	meta, _ := o["metadata"].(object)
	meta["ownerReferences"] = []any{object{"apiVersion": "v1", "kind": owner.str("kind"),
		"name": owner.name(), "uid": owner.uid()}}
	return o
}

// view contains all objects of a change, as they were last read.
type view struct {
	plan                                            *plan
	old, fresh, claim, kept, temporary, shot, owner object
	users, holders                                  []object // see the functions users and holders
	foreignPods                                     []object // pods of the command's own claims
	namespaceGone                                   bool
}

// observe reads the objects of a change. It fails if another run has taken over the change.
func (r *run) observe(ctx context.Context) (v view, err error) {
	if v.old, err = r.Kubectl.get(ctx, persistentVolumes, "", r.old); err != nil || v.old == nil {
		return v, err
	}
	if v.plan, err = planOf(v.old); err != nil || v.plan == nil {
		return v, err
	}
	p := v.plan
	if p.Run != r.id {
		return v, fmt.Errorf("another run of this command has taken over the change of %s", p.path())
	}
	for _, o := range []struct {
		into           *object
		resource, name string
	}{
		{&v.claim, claims, p.Claim},
		{&v.kept, claims, p.kept()},
		{&v.temporary, claims, p.temporary()},
		{&v.shot, snapshots, p.Shot.Name},
		{&v.owner, p.Owner.resource(), p.Owner.Name},
	} {
		if *o.into, err = r.Kubectl.get(ctx, o.resource, p.Namespace, o.name); err != nil {
			return v, err
		}
	}
	made := []object{v.kept, v.temporary}
	if p.SnapshotClass != "" {
		made = append(made, v.shot)
	}
	for _, o := range made {
		if o != nil && !v.own(o) {
			return v, fmt.Errorf("%s %s has a name of this change and not its annotation %s: whoever made "+
				"it has to delete it first", o.str("kind"), o.name(), changeKey)
		}
	}
	r.last = p
	if v.owner.uid() != p.Owner.UID {
		v.owner = nil // do not change a later object of the same name
	}
	fresh := cmp.Or(p.New, v.temporary.str("spec", "volumeName"))
	if fresh == "" && v.temporary == nil && p.TemporaryUID != "" {
		fresh = volumeOf(p.TemporaryUID) // the temporary claim was deleted too early
	}
	if v.fresh, err = r.Kubectl.get(ctx, persistentVolumes, "", fresh); err != nil {
		return v, err
	}
	if v.claim == nil || v.claim.uid() != p.ClaimUID {
		namespace, err := r.Kubectl.get(ctx, "namespaces", "", p.Namespace)
		if err != nil {
			return v, err
		}
		v.namespaceGone = namespace.uid() != p.NamespaceUID // deleted, and perhaps created again
	}
	pods, err := r.Kubectl.all(ctx, "pods", p.Namespace)
	v.users, v.holders = users(pods, p.Claim), holders(pods, p.Claim)
	v.foreignPods = append(holders(pods, p.kept()), holders(pods, p.temporary())...)
	return v, err
}

// volumeOf returns the name that the provisioner gives to the PersistentVolume of a claim.
func volumeOf(claimUID string) string { return "pvc-" + claimUID }

// madeFor reports whether the provisioner made the new PersistentVolume for the temporary claim.
// Kubernetes may have bound an older one, or a user may have named one in the claim.
func (v view) madeFor() bool {
	uid := v.plan.TemporaryUID
	if v.temporary != nil && uid == "" {
		uid = v.temporary.uid()
	}
	return v.fresh.name() == volumeOf(uid) && v.fresh.str("spec", "csi", "driver") == volume.DriverName
}

// original reports whether the claim existed before the change and was not created again.
func (v view) original() bool { return v.claim != nil && v.claim.uid() == v.plan.ClaimUID }

// again() reports whether the command has created the claim again. Such a claim names the new
// volume or, during an undo, the earlier one.
func (v view) again() bool {
	pv := v.plan.New
	if v.plan.Undo {
		pv = v.plan.Old
	}
	return v.claim != nil && v.claim.str("spec", "volumeName") == pv && pv != ""
}

// passed() reports whether the change is past the point of no return: the new disk was bound to the
// user's claim, so a workload may have written to it. It also returns true if the plan is marked
// Handed, and the new PersistentVolume and the temporary claim are gone.
func (v view) passed() bool {
	p, uid := v.plan, v.fresh.str("spec", "claimRef", "uid")
	return p.Bound || p.Finished || v.fresh == nil && p.Handed && v.temporary == nil ||
		p.New != "" && v.fresh != nil && uid != "" && uid != p.TemporaryUID
}

// otherClaim returns an error if somebody else has created the claim since the change began.
func (v view) otherClaim() error {
	if v.claim == nil || v.original() || v.again() || v.plan.Undo && v.neverBound() {
		return nil
	}
	way := "--continue or --undo"
	if v.plan.Undo {
		way = "--undo"
	}
	return fmt.Errorf("another PersistentVolumeClaim %s was made meanwhile (uid %s, volume %.80q), "+
		"and is left alone. Stop who made it (scale the StatefulSet down, suspend Argo CD or Flux); "+
		"delete it if its disk holds nothing that is needed, and repeat the command with %s",
		v.plan.path(), v.claim.uid(), v.claim.str("spec", "volumeName"), way)
}

// neverBound reports whether the claim names the new disk, but was never bound to it.
func (v view) neverBound() bool {
	return v.plan.New != "" && v.claim.str("spec", "volumeName") == v.plan.New && !v.passed()
}

// guard returns an error if the new disk may lack data, or if an object that the change needs is
// gone.
func (v view) guard() error {
	switch p := v.plan; {
	case v.otherClaim() != nil:
		return v.otherClaim()
	case len(v.foreignPods) > 0:
		return fmt.Errorf("pod %s uses a claim of this command's own, and may write data that the new "+
			"disk lacks; delete it, and repeat the command with --undo", names(v.foreignPods))
	case v.kept == nil && p.Unmounted && p.New == "":
		return fmt.Errorf("PersistentVolumeClaim %s was deleted; repeat the command with --continue, "+
			"which makes it again, or with --undo", p.kept())
	case p.New != "" && v.fresh == nil:
		return fmt.Errorf("PersistentVolume %s is gone, and the new disk may be gone with it; repeat "+
			"the command with --undo", p.New)
	case v.shot != nil && p.Shot.UID != "" && v.shot.uid() != p.Shot.UID:
		return fmt.Errorf("VolumeSnapshot %s was made again (uid %s, expected %s), and holds something "+
			"else; repeat the command with --undo", p.Shot.Name, v.shot.uid(), p.Shot.UID)
	}
	return nil
}

// prove compares the new PersistentVolume with the request. A webhook or a controller may have
// changed either.
func (v view) prove() error {
	p, pv := v.plan, v.fresh
	handle, attributes := pv.str("spec", "csi", "volumeHandle"), "volumeAttributes"
	size, _ := parseSize(pv.str("spec", "capacity", "storage"))
	want, _ := parseSize(p.Size)
	origin := pv.str("spec", "csi", attributes, volume.CtxSnapshotID)
	differs := func(what, found, expected string) error {
		return fmt.Errorf("the new PersistentVolume %s is not what was asked for: its %s is %.80q, "+
			"expected %.80q; repeat the command with --undo", pv.name(), what, found, expected)
	}
	switch {
	case !v.madeFor():
		return fmt.Errorf("PersistentVolumeClaim %s was bound to PersistentVolume %s, which was not "+
			"made for it; repeat the command with --undo", p.temporary(), pv.name())
	case handle == "" || slices.Contains(p.earlier(), handle):
		return differs("disk", handle, "another one than "+strings.Join(p.earlier(), ", "))
	case pv.deleting():
		return fmt.Errorf("PersistentVolume %s is being deleted by somebody; repeat the command with "+
			"--undo", pv.name())
	case size < want:
		return differs("capacity", pv.str("spec", "capacity", "storage"), p.Size)
	case v.temporary != nil && v.temporary.str("spec", "dataSource", "name") != p.Shot.Name:
		return differs("claim's dataSource", v.temporary.str("spec", "dataSource", "name"), p.Shot.Name)
	case p.Shot.Handle == "" || origin != p.Shot.Handle:
		return differs("snapshot ("+volume.CtxSnapshotID+" of its volumeAttributes, which a driver of "+
			"this version writes)", origin, p.Shot.Handle)
	case p.NewHandle != "" && handle != p.NewHandle:
		return differs("disk", handle, p.NewHandle)
	}
	return nil
}

// end() returns a text that names a claim, and the pods and finalizers that delay its deletion.
func (v view) end(claim object) string {
	pods, text := v.foreignPods, "the end of PersistentVolumeClaim "+claim.name()
	if claim.name() == v.plan.Claim {
		pods = v.holders
	}
	if len(pods) > 0 {
		text += ", which these pods keep: " + names(pods) + " (stop them; delete those that have ended)"
	}
	if f := claim.foreignFinalizer(); f != "" {
		text += ", which the finalizer " + f + " keeps"
	}
	return text
}

func (v view) podRuns() bool {
	return slices.ContainsFunc(v.users, func(pod object) bool {
		return pod.str("status", "phase") == "Running"
	})
}

// contentProblem returns an error unless the snapshot was taken of one of the disks in "of".
func contentProblem(shot, content object, of []string) error {
	source := content.str("spec", "source", "volumeHandle")
	switch {
	case content.str("spec", "driver") != volume.DriverName || source == "" ||
		!slices.Contains(of, source):
		return fmt.Errorf("the VolumeSnapshot %s was not taken of this claim: it is of the claim %q and "+
			"of the volume %q, and the claim has had %s. A revert is to an earlier state of the same "+
			"claim; make a new claim of a foreign snapshot (docs/howto/snapshots.md)", shot.name(),
			shot.str("spec", "source", "persistentVolumeClaimName"), source, strings.Join(of, ", "))
	case content.str("spec", "volumeSnapshotRef", "uid") != shot.uid():
		return fmt.Errorf("the VolumeSnapshotContent %s belongs to another VolumeSnapshot than %s",
			content.name(), shot.name())
	case content.str("status", "snapshotHandle") == "":
		return fmt.Errorf("the VolumeSnapshotContent %s names no snapshot of the rack", content.name())
	}
	return nil
}
