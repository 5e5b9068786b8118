package claim

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// view is the state of all objects of a change.
type view struct {
	plan                                            *plan
	old, fresh, claim, kept, temporary, shot, owner object
	users, holders                                  []object // pods of the claim
	foreignPods                                     []object // pods of the command's own claims
	namespaceGone                                   bool
}

// observe reads the objects of a change. It fails if another run of the command has taken over.
func (r *run) observe(ctx context.Context) (v view, err error) {
	if v.old, err = r.get(ctx, persistentVolumes, "", r.old); err != nil || v.old == nil {
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
		into                      *object
		resource, namespace, name string
	}{
		{&v.claim, claims, p.Namespace, p.Claim},
		{&v.kept, claims, p.Namespace, p.kept()},
		{&v.temporary, claims, p.Namespace, p.temporary()},
		{&v.shot, snapshots, p.Namespace, p.Shot.Name},
		{&v.owner, p.Owner.resource(), p.Namespace, p.Owner.Name},
	} {
		if o.resource == "" {
			continue
		}
		if *o.into, err = r.get(ctx, o.resource, o.namespace, o.name); err != nil {
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
		v.owner = nil // another one of its name is not touched
	}
	fresh := p.New
	if fresh == "" {
		fresh = v.temporary.str("spec", "volumeName")
	}
	if fresh == "" && v.temporary == nil && p.TemporaryUID != "" {
		fresh = volumeOf(p.TemporaryUID) // its claim was deleted while it was made
	}
	if v.fresh, err = r.get(ctx, persistentVolumes, "", fresh); err != nil {
		return v, err
	}
	if v.claim == nil || v.claim.uid() != p.ClaimUID {
		namespace, err := r.get(ctx, "namespaces", "", p.Namespace)
		if err != nil {
			return v, err
		}
		v.namespaceGone = namespace.uid() != p.NamespaceUID // gone, or made again by somebody
	}
	pods, err := r.all(ctx, "pods", p.Namespace)
	v.users, v.holders = users(pods, p.Claim), holders(pods, p.Claim)
	v.foreignPods = append(holders(pods, p.kept()), holders(pods, p.temporary())...)
	return v, err
}

// volumeOf returns the name that the provisioner gives to the PersistentVolume of a claim.
func volumeOf(claimUID string) string { return "pvc-" + claimUID }

// madeFor reports whether the provisioner made the new PersistentVolume for the temporary claim.
// Kubernetes may bind a claim to one that was there before, and whoever may change the claim may
// name one.
func (v view) madeFor() bool {
	uid := v.plan.TemporaryUID
	if v.temporary != nil && uid == "" {
		uid = v.temporary.uid()
	}
	return v.fresh.name() == volumeOf(uid) && v.fresh.str("spec", "csi", "driver") == volume.DriverName
}

// original reports whether the claim is the earlier one.
func (v view) original() bool { return v.claim != nil && v.claim.uid() == v.plan.ClaimUID }

// again reports whether the claim is the one that the command creates for the new disk, or, to undo
// the change, for the earlier disk.
func (v view) again() bool {
	pv := v.plan.New
	if v.plan.Undo {
		pv = v.plan.Old
	}
	return v.claim != nil && v.claim.str("spec", "volumeName") == pv && pv != ""
}

// passed reports whether the point of no return has been passed: the new disk was bound to a claim
// that is not the command's own, and may have been written since. If the new PersistentVolume is
// gone after it was handed over, this is assumed.
func (v view) passed() bool {
	p, uid := v.plan, v.fresh.str("spec", "claimRef", "uid")
	return p.Bound || p.Finished || v.fresh == nil && p.Handed && v.temporary == nil ||
		p.New != "" && v.fresh != nil && uid != "" && uid != p.TemporaryUID
}

// otherClaim returns an error if the claim exists and was not created by the command.
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

// neverBound reports whether the claim is one that was made for the new disk and was not bound to
// it.
func (v view) neverBound() bool {
	return v.plan.New != "" && v.claim.str("spec", "volumeName") == v.plan.New && !v.passed()
}

// guard returns an error if data would be missing on the new disk.
func (v view) guard() error {
	switch p := v.plan; {
	case v.otherClaim() != nil:
		return v.otherClaim()
	case len(v.foreignPods) > 0:
		return fmt.Errorf("pod %s uses a claim of this command's own, and may write what the new disk "+
			"lacks; delete it, and repeat the command with --undo", names(v.foreignPods))
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

// prove compares the new disk with what was requested: a webhook or a controller may have changed
// the request or the PersistentVolume.
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

// end describes what the deletion of a claim waits for.
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

// mounted reports whether a pod runs with the claim.
func (v view) mounted() bool {
	return slices.ContainsFunc(v.users, func(pod object) bool {
		return pod.str("status", "phase") == "Running"
	})
}

// contentProblem returns an error unless a snapshot was taken of one of the given disks.
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
