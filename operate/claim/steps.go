package claim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// step is a step of a change or of an undo. do() sends at most one request. Until done() returns
// true, the objects are read again and do() is called again. If do() has to wait, it returns what
// it waits for. A step without done() is done when the plan is gone.
type step struct {
	name     string
	describe func(p plan) string
	done     func(v view) bool
	do       func(r *run, ctx context.Context, v view) (waits string, err error)
}

var steps = []step{
	{"record", func(p plan) string {
		return fmt.Sprintf("record the plan on PersistentVolume %s (%s, disk %s), which gets the "+
			"reclaim policy Retain (now %s), and mark the claim", p.Old, p.OldSize, p.Handle, p.Policy)
	}, func(v view) bool { return !v.original() || v.claim.annotation(planKey) == v.plan.Run },
		(*run).mark},
	{"stop", describeStop, func(v view) bool {
		return !v.original() || v.claim.deleting() || v.stopped() && len(v.users) == 0
	}, (*run).stop},
	{"unclaim", func(p plan) string {
		return fmt.Sprintf("delete PersistentVolumeClaim %s, so that no pod can use the disk, and wait "+
			"until it is gone; its disk stays", p.Claim)
	}, func(v view) bool { return !v.original() }, func(r *run, ctx context.Context, v view) (string,
		error) {
		return r.release(ctx, v, v.claim, v.old)
	}},
	{"keep", func(p plan) string {
		return fmt.Sprintf("give the disk to PersistentVolumeClaim %s, which nobody uses", p.kept())
	}, func(v view) bool { return v.plan.New != "" || v.bound(v.kept, v.old) }, (*run).keep},
	{"unmounted", func(plan) string {
		return "wait until each node that had the disk has reported that it is unmounted, or until it " +
			"is detached from the node"
	}, func(v view) bool { return v.plan.Unmounted }, (*run).unmounted},
	{"snapshot", func(p plan) string {
		if p.Verb == Revert {
			return fmt.Sprintf("use VolumeSnapshot %s, which is ready", p.Shot.Name)
		}
		return fmt.Sprintf("take VolumeSnapshot %s of class %s", p.Shot.Name, p.SnapshotClass)
	}, func(v view) bool { return v.plan.Shot.Handle != "" }, (*run).takeSnapshot},
	{"disk", func(p plan) string {
		near := ""
		if p.Node != "" {
			near = " near node " + p.Node
		}
		return fmt.Sprintf("make a disk of %s from the snapshot%s, for PersistentVolumeClaim %s, and "+
			"compare it with what was asked for", p.Size, near, p.temporary())
	}, func(v view) bool { return v.plan.New != "" }, (*run).makeDisk},
	{"hand", func(p plan) string {
		return fmt.Sprintf("delete PersistentVolumeClaim %s, whose disk stays, and make "+
			"PersistentVolumeClaim %s again for it, of %s, with its labels, annotations and owners. POINT "+
			"OF NO RETURN: when Kubernetes binds the two", p.temporary(), p.Claim, p.Size)
	}, func(v view) bool { return v.plan.Bound && v.bound(v.claim, v.fresh) }, (*run).handOver},
	{"start", func(p plan) string {
		how := "wait until you have started the workload"
		switch {
		case p.Owner.resource() != "":
			how = fmt.Sprintf("scale %s back to %d", p.Owner, p.Owner.Replicas)
		case p.Owner.Kind == "":
			how = "start nothing, because nothing used the claim"
		}
		return fmt.Sprintf("%s; when it runs, give the new PersistentVolume the reclaim policy %s, and "+
			"delete the snapshot of this change and PersistentVolumeClaim %s, whose disk stays", how,
			p.Policy, p.kept())
	}, func(v view) bool { return v.plan.Finished }, (*run).start},
}

// undoing contains the steps of an undo. The workload starts before the step "clean", so that it
// does not wait until the rack has deleted the new disk and the snapshot.
var undoing = []step{
	// The marks of this step change the resourceVersions of claim and owner. So the API server
	// refuses a late request of a killed run, which contains an older resourceVersion.
	{"record", func(plan) string { return "take the change over" }, func(v view) bool {
		mark := v.owner.annotation(changeKey)
		return steps[0].done(v) && (v.owner == nil || mark == v.plan.stopMark() ||
			mark == v.plan.runMark())
	}, (*run).takeOver},
	{"reach", func(p plan) string { return "reserve the new disk, so that no other claim gets it" },
		func(v view) bool { return !v.plan.Handed && v.fenced() }, (*run).takeBack},
	{"hand", func(p plan) string {
		return fmt.Sprintf("make PersistentVolumeClaim %s again for the earlier disk", p.Claim)
	}, func(v view) bool {
		return v.namespaceGone || v.again() && !v.claim.deleting() && v.bound(v.claim, v.old)
	}, (*run).restore},
	{"start", func(p plan) string { return "start what was stopped" },
		func(v view) bool { return !v.own(v.owner) }, (*run).scaleUp},
	{"clean", func(p plan) string { return "delete the new disk, and the snapshot of this change" },
		func(v view) bool {
			return v.fresh == nil && v.temporary == nil && v.kept == nil && !v.own(v.shot)
		}, (*run).clean},
	{"forget", func(plan) string { return "remove the plan" }, nil, (*run).endUndoing},
}

func (v view) bound(claim, pv object) bool {
	return claim != nil && claim.str("status", "phase") == "Bound" &&
		claim.str("spec", "volumeName") == pv.name() && pv.str("spec", "claimRef", "uid") == claim.uid()
}

func (v view) own(o object) bool {
	return strings.HasPrefix(o.annotation(changeKey)+" ", v.plan.mark()+" ")
}

// runMark is the value of changeKey on objects that a late request of another run must not change.
// stopMark is the value of changeKey on an owner that the command has stopped.
func (p plan) runMark() string  { return p.mark() + " " + p.Run }
func (p plan) stopMark() string { return p.runMark() + " stopped" }

// stopped() reports whether the command has scaled the owner down, or has no owner to scale.
func (v view) stopped() bool {
	return v.owner == nil || v.own(v.owner) && v.owner.num("spec", "replicas") <= v.plan.Owner.Target
}

// reserve returns the field of a PersistentVolume's spec that reserves it for a claim. If uid is
// nil, the claim need not exist yet.
func reserve(claim string, uid any) object {
	return object{"claimRef": object{"name": claim, "uid": uid, "resourceVersion": nil}}
}

func (r *run) mark(ctx context.Context, v view) (string, error) {
	return "", r.Kubectl.patch(ctx, v.claim, annotate(planKey, v.plan.Run, nil))
}

func (r *run) takeOver(ctx context.Context, v view) (string, error) {
	if !steps[0].done(v) {
		return r.mark(ctx, v)
	}
	if mark := v.owner.annotation(changeKey); mark != "" && !v.own(v.owner) {
		return "", fmt.Errorf("%s is stopped by another change (%.80q): complete or undo that one first",
			v.plan.Owner, mark)
	}
	mark := v.plan.runMark()
	if v.own(v.owner) && strings.HasSuffix(v.owner.annotation(changeKey), " stopped") {
		mark = v.plan.stopMark()
	}
	return "", r.Kubectl.patch(ctx, v.owner, annotate(changeKey, mark, nil))
}

func describeStop(p plan) string {
	then := ", and wait until its pods have ended"
	switch {
	case p.Owner.Kind == "":
		return "nothing uses the claim now; leave it so"
	case p.Owner.resource() == "":
		return fmt.Sprintf("wait until you have stopped %s, which uses the claim (pod %s), as its "+
			"manager wants it", p.Owner, p.Owner.Pod)
	case p.Owner.Target > 0:
		then = fmt.Sprintf("; the pods below %s run on", p.Owner.Pod)
	}
	return fmt.Sprintf("scale %s from %d to %d%s", p.Owner, p.Owner.Replicas, p.Owner.Target, then)
}

// scaled returns a patch that scales the owner and marks it. If mark is nil, it removes the mark.
func scaled(replicas int64, mark any) object {
	return annotate(changeKey, mark, object{"replicas": replicas})
}

func (r *run) stop(ctx context.Context, v view) (string, error) {
	p := v.plan
	switch mark := v.owner.annotation(changeKey); {
	case mark != "" && !v.own(v.owner):
		return "", fmt.Errorf("%s is stopped by another change (%.80q): complete or undo that one, and "+
			"repeat the command with --continue", p.Owner, mark)
	case !v.stopped():
		return "", r.Kubectl.patch(ctx, v.owner, scaled(p.Owner.Target, p.stopMark()))
	case v.owner == nil:
		return fmt.Sprintf("you to stop %s: the claim is used by %s", p.Owner, names(v.users)), nil
	}
	return "the end of " + names(v.users), nil
}

func (r *run) scaleUp(ctx context.Context, v view) (string, error) {
	replicas := v.owner.num("spec", "replicas")
	if replicas == v.plan.Owner.Target && // otherwise somebody else has scaled the owner
		strings.HasSuffix(v.owner.annotation(changeKey), " stopped") {
		replicas = v.plan.Owner.Replicas
	}
	return "", r.Kubectl.patch(ctx, v.owner, scaled(replicas, nil))
}

// release deletes a claim. Before that it sets the reclaim policy Retain, so that the disk stays.
func (r *run) release(ctx context.Context, v view, claim, pv object) (string, error) {
	switch {
	case pv.deleting():
		return "", fmt.Errorf("PersistentVolume %s is being deleted by somebody, and goes when nothing "+
			"is bound to it; its disk %s would be on the rack alone. Copy what you need from it by a pod "+
			"with PersistentVolumeClaim %s; when it may go, delete that claim by hand", pv.name(),
			pv.str("spec", "csi", "volumeHandle"), claim.name())
	case pv.policy() != "Retain":
		return "", r.Kubectl.patch(ctx, pv, object{"spec": withPolicy("Retain")})
	}
	return v.end(claim), r.Kubectl.remove(ctx, claim)
}

func (r *run) keep(ctx context.Context, v view) (string, error) {
	p, uid := v.plan, v.old.str("spec", "claimRef", "uid")
	switch {
	case v.otherClaim() != nil:
		return "", v.otherClaim()
	case v.old.str("spec", "claimRef", "name") != p.kept() || uid != "" && uid != v.kept.uid():
		return "", r.Kubectl.patch(ctx, v.old, object{"spec": reserve(p.kept(), nil)})
	case v.kept == nil:
		return "", r.Kubectl.create(ctx, p.keptClaim())
	}
	return "PersistentVolumeClaim " + p.kept() + " to be bound", nil
}

// unmounted() waits until each node that has the disk has reported the unmount. A kubelet lists a
// volume in its Node's status from before the mount until after the unmount. So the first status
// after the end of the last pod is reliable. The disk may stay attached: all data is on it, and a
// rack without hot-plug has to stop the node for a detach. If a node does not report, its instance
// may still write, so the disk has to be detached from that node.
func (r *run) unmounted(ctx context.Context, v view) (string, error) {
	p := *v.plan
	if err := v.guard(); err != nil {
		return "", err
	}
	all, err := r.Kubectl.all(ctx, volumeAttachments, "")
	if err != nil {
		return "", err
	}
	seen, waits := map[string]string{}, ""
	maps.Copy(seen, p.Seen)
	for _, a := range all {
		if a.str("spec", "source", "persistentVolumeName") != p.Old {
			continue
		}
		name := a.str("spec", "nodeName")
		node, err := r.Kubectl.get(ctx, "nodes", "", name)
		if err != nil {
			return "", err
		}
		ready, report := node.report()
		used, _ := node.at("status", "volumesInUse").([]any)
		before, known := p.Seen[name]
		uid, began := p.Nodes[name]
		switch report = node.uid() + " " + report; {
		case !known:
			seen[name] = report
			waits = "node " + name + " to report that the disk is unmounted (within five minutes)"
		case !ready || began && node.uid() != uid || !strings.HasPrefix(before, node.uid()+" "):
			waits = fmt.Sprintf("the disk to be detached from node %s, which is gone, was made again or is "+
				"not ready, and may still write", name)
		case slices.Contains(used, any("kubernetes.io/csi/"+volume.DriverName+"^"+p.Handle)):
			waits = "node " + name + " to unmount the disk"
		case before == report:
			waits = "node " + name + " to report that the disk is unmounted (within five minutes)"
		}
	}
	if p.Unmounted = waits == ""; !p.Unmounted && maps.Equal(seen, p.Seen) {
		return waits, nil
	}
	p.Seen = seen
	return waits, r.Kubectl.save(ctx, v.old, p, nil)
}

// report returns whether a node is ready, and when it last reported, by the node's own clock.
func (o object) report() (ready bool, at string) {
	for _, c := range o.list("status", "conditions") {
		if c.str("type") == "Ready" {
			return c.str("status") == "True", c.str("lastHeartbeatTime")
		}
	}
	return false, ""
}

func (r *run) takeSnapshot(ctx context.Context, v view) (string, error) {
	p, err := *v.plan, v.guard()
	if err != nil {
		return "", err
	}
	switch {
	case v.shot == nil:
		class, err := r.Kubectl.get(ctx, snapshotClasses, "", p.SnapshotClass)
		if err != nil {
			return "", err
		}
		if class.uid() != p.SnapshotClassUID {
			return "", fmt.Errorf("the VolumeSnapshotClass %s is gone, or was made again; repeat the "+
				"command with --undo", p.SnapshotClass)
		}
		return "", r.Kubectl.create(ctx, ownedBy(p.ownSnapshot(), v.kept))
	case v.shot.str("status", "error", "message") != "":
		return "VolumeSnapshot " + p.Shot.Name + ": " +
			csierr.Plain(v.shot.str("status", "error", "message")), nil
	case v.shot.at("status", "readyToUse") != true:
		return "VolumeSnapshot " + p.Shot.Name, nil
	}
	if p.Shot, err = r.Kubectl.shotOf(ctx, v.shot, []string{p.Handle}); err != nil {
		return "", fmt.Errorf("%w; repeat the command with --undo", err)
	}
	return "", r.Kubectl.save(ctx, v.old, p, nil)
}

// shotOf reads the content of a ready snapshot, and checks that "of" contains the snapshot's disk.
func (k Kubectl) shotOf(ctx context.Context, o object, of []string) (shot, error) {
	content, err := k.get(ctx, snapshotContents, "", o.str("status", "boundVolumeSnapshotContentName"))
	if err == nil {
		err = contentProblem(o, content, of)
	}
	return shot{Name: o.name(), UID: o.uid(), Content: content.name(), ContentUID: content.uid(),
		Handle: content.str("status", "snapshotHandle")}, err
}

func (r *run) makeDisk(ctx context.Context, v view) (string, error) {
	p := *v.plan
	if err := v.guard(); err != nil {
		return "", err
	}
	switch t := v.temporary; {
	case t == nil && p.TemporaryUID != "":
		return "", fmt.Errorf("PersistentVolumeClaim %s was deleted, and its disk may still come; "+
			"repeat the command with --undo", p.temporary())
	case t == nil:
		return "", r.askForDisk(ctx, v)
	case p.TemporaryUID == "":
		p.TemporaryUID = t.uid()
		return "", r.Kubectl.save(ctx, v.old, p, nil)
	case t.uid() != p.TemporaryUID:
		return "", fmt.Errorf("PersistentVolumeClaim %s was made again by somebody; repeat the command "+
			"with --undo", p.temporary())
	case t.str("status", "phase") == "Bound" && v.fresh != nil:
		if err := v.prove(); err != nil {
			return "", err
		}
		p.New, p.NewHandle = v.fresh.name(), v.fresh.str("spec", "csi", "volumeHandle")
		return "", r.Kubectl.save(ctx, v.old, p, nil)
	}
	return r.awaitDisk(ctx, v)
}

// askForDisk creates the temporary claim if the plan's StorageClass and snapshot were not replaced.
func (r *run) askForDisk(ctx context.Context, v view) error {
	p := v.plan
	class, err := r.Kubectl.get(ctx, storageClasses, "", p.Manifest.str("spec", "storageClassName"))
	if err != nil {
		return err
	}
	shot, err := r.Kubectl.shotOf(ctx, v.shot, p.earlier())
	switch {
	case v.shot == nil || err == nil && shot != p.Shot:
		return fmt.Errorf("the VolumeSnapshot %s is gone, or is of something else than when it was "+
			"checked; repeat the command with --undo", p.Shot.Name)
	case err != nil:
		return err
	case class.uid() != p.ClassUID:
		return fmt.Errorf("the StorageClass %s is gone, or was made again; repeat the command with "+
			"--undo", p.Manifest.str("spec", "storageClassName"))
	}
	r.asked = true
	return r.Kubectl.create(ctx, ownedBy(p.temporaryClaim(), v.kept))
}

// awaitDisk waits for the new disk. The returned error or text contains the last refusal, if any.
func (r *run) awaitDisk(ctx context.Context, v view) (string, error) {
	p := v.plan
	why, event, err := r.Kubectl.refusal(ctx, *p)
	if err != nil {
		return "", err
	}
	refused := fmt.Errorf("the new disk could not be made: %s. Repeat the command with --continue "+
		"when that is solved, or with --undo", why)
	if p.Node != "" && v.temporary.annotation(selectedNode) == "" {
		// The provisioner has removed the annotation, because the rack has no room. Ask once more.
		if r.asked {
			return "", refused
		}
		r.asked, r.before = true, event
		return "", r.Kubectl.patch(ctx, v.temporary, annotate(selectedNode, p.Node, nil))
	}
	// Without a topology, or with immediate binding, the provisioner repeats its request by itself.
	// The command does not wait for the repetitions, because the workload is stopped.
	if !r.asked {
		r.asked, r.before = true, event
	} else if event != r.before && strings.Contains(why, string(csierr.RackFull)+":") {
		return "", refused
	}
	if why != "" {
		why = " (last refusal: " + why + ")"
	}
	return "the new disk" + why, nil
}

// refusal returns the provisioner's last message about the temporary claim, and an id of the event
// that contains the message. Without a message both are "".
func (k Kubectl) refusal(ctx context.Context, p plan) (why, event string, err error) {
	events, err := k.all(ctx, "events", p.Namespace, "--field-selector=type=Warning,"+
		"involvedObject.kind=PersistentVolumeClaim,involvedObject.name="+p.temporary())
	last := ""
	for _, e := range events {
		if at := e.str("lastTimestamp"); at >= last {
			last, why = at, e.str("message")
			event = fmt.Sprint(e.name(), " ", at, " ", e.num("count")) // a repetition increases the count
		}
	}
	return csierr.Plain(why), event, err
}

func (r *run) handOver(ctx context.Context, v view) (string, error) {
	p := *v.plan
	if v.passed() && !p.Bound && v.fresh != nil {
		p.Bound = true
		return "", r.Kubectl.save(ctx, v.old, p, nil)
	}
	if err := v.guard(); err != nil {
		return "", err
	}
	if err := v.prove(); err != nil {
		return "", err
	}
	switch {
	case v.fresh.annotation(replacesKey) == "" || v.fresh.policy() != "Retain":
		return "", r.Kubectl.patch(ctx, v.fresh, annotate(replacesKey, p.Old, withPolicy("Retain")))
	case v.temporary != nil:
		return r.release(ctx, v, v.temporary, v.fresh)
	case !p.Handed:
		p.Handed = true
		return "", r.Kubectl.save(ctx, v.old, p, nil)
	case v.namespaceGone:
		return "", fmt.Errorf("the namespace %s is gone. %s", p.Namespace, v.byHand())
	case v.claim.deleting():
		return v.end(v.claim), nil // the new PersistentVolume keeps the policy Retain
	case v.unreserved(v.fresh):
		return "", r.Kubectl.patch(ctx, v.fresh, object{"spec": reserve(p.Claim, nil)})
	case v.claim == nil:
		return "", r.Kubectl.createOwned(ctx, r.log, p.newClaim(p.New))
	}
	return "PersistentVolumeClaim " + p.Claim + " to be bound", nil
}

func (r *run) start(ctx context.Context, v view) (string, error) {
	p := *v.plan
	switch {
	case v.fresh == nil:
		return "", v.tooLate()
	case !v.bound(v.claim, v.fresh) || v.claim.deleting():
		return "", fmt.Errorf("PersistentVolumeClaim %s is not bound any more; its disk is kept. Repeat "+
			"the command with --continue, which makes it again after %s", p.path(), v.end(v.claim))
	case v.own(v.owner):
		return r.scaleUp(ctx, v)
	case p.Owner.Kind != "" && !v.podRuns():
		return "a pod of " + p.Owner.String() + " to run with the new disk" +
			strings.TrimSuffix(", now "+names(v.users), ", now "), nil
	case v.fresh.policy() != p.Policy:
		return "", r.Kubectl.patch(ctx, v.fresh, object{"spec": withPolicy(p.Policy)})
	case v.kept != nil: // Kubernetes then deletes the snapshot that v.kept owns
		return r.release(ctx, v, v.kept, v.old)
	case v.own(v.shot):
		return "the end of VolumeSnapshot " + p.Shot.Name, nil
	}
	p.Finished = true
	return "", r.Kubectl.save(ctx, v.old, p, nil)
}

// fenced() reports whether there is no new disk, or this run has reserved it against late requests.
func (v view) fenced() bool {
	return v.plan.New == "" || v.fresh == nil || v.fresh.annotation(changeKey) == v.plan.runMark() &&
		v.fresh.str("spec", "claimRef", "name") == v.plan.temporary()
}

// unreserved() reports whether a PersistentVolume still has to be reserved for the user's claim.
func (v view) unreserved(pv object) bool {
	uid := pv.str("spec", "claimRef", "uid")
	return pv.str("spec", "claimRef", "name") != v.plan.Claim || uid != "" && uid != v.claim.uid()
}

// takeBack reserves the new disk for the temporary claim. A late request may still create the
// user's claim, and Kubernetes must not bind the disk to that claim.
func (r *run) takeBack(ctx context.Context, v view) (string, error) {
	p := *v.plan
	if !v.fenced() {
		return "", r.Kubectl.patch(ctx, v.fresh, annotate(changeKey, p.runMark(),
			reserve(p.temporary(), p.TemporaryUID)))
	}
	p.Handed = false
	return "", r.Kubectl.save(ctx, v.old, p, nil)
}

func (r *run) restore(ctx context.Context, v view) (string, error) {
	p := *v.plan
	switch {
	case v.otherClaim() != nil:
		return "", v.otherClaim()
	case v.claim.deleting():
		return v.end(v.claim), nil
	case v.neverBound():
		return v.end(v.claim), r.Kubectl.remove(ctx, v.claim)
	case v.temporary != nil:
		return r.removeTemporary(ctx, v)
	case v.own(v.shot) && !v.shot.deleting(): // an unready snapshot blocks the deletion of v.kept
		return "", r.Kubectl.remove(ctx, v.shot)
	case v.kept != nil:
		return r.release(ctx, v, v.kept, v.old)
	case v.unreserved(v.old):
		return "", r.Kubectl.patch(ctx, v.old, object{"spec": reserve(p.Claim, nil)})
	case v.claim == nil:
		spec, _ := p.Manifest["spec"].(map[string]any)
		return "", r.Kubectl.createOwned(ctx, r.log, p.again(spec, nil))
	}
	return "PersistentVolumeClaim " + p.Claim + " to be bound", nil
}

// removeTemporary deletes the temporary claim. That deletes the new disk, which has no writes yet.
func (r *run) removeTemporary(ctx context.Context, v view) (string, error) {
	p, policy := *v.plan, v.fresh.policy()
	switch {
	case p.TemporaryUID == "" || p.TemporaryUID != v.temporary.uid() && p.New == "":
		p.TemporaryUID = v.temporary.uid() // volumeOf needs it to find a later PersistentVolume
		return "", r.Kubectl.save(ctx, v.old, p, nil)
	case v.fresh != nil && !v.madeFor() && policy != "Retain":
		return "", fmt.Errorf("PersistentVolume %s, which was not made for PersistentVolumeClaim %s, "+
			"would be deleted with it: give it the reclaim policy Retain, and repeat the command",
			v.fresh.name(), p.temporary())
	case v.fresh == nil && p.Retains:
		r.log("    note: the provisioner may still make PersistentVolume %s, and its class retains it: "+
			"if it comes, give it the reclaim policy Delete", volumeOf(p.TemporaryUID))
	}
	return v.end(v.temporary), r.Kubectl.remove(ctx, v.temporary)
}

func (r *run) clean(ctx context.Context, v view) (string, error) {
	switch {
	case v.temporary != nil:
		return r.removeTemporary(ctx, v)
	case v.own(v.shot) && !v.shot.deleting():
		return "", r.Kubectl.remove(ctx, v.shot)
	case v.kept != nil: // a late request has created it
		return r.release(ctx, v, v.kept, v.old)
	case v.own(v.shot):
		return "the end of VolumeSnapshot " + v.shot.name(), nil
	case !v.madeFor():
		return "", fmt.Errorf("PersistentVolume %s was not made by this change, and is left alone: "+
			"look at it, and repeat the command when it is gone", v.fresh.name())
	case v.fresh.policy() != "Delete":
		return "", r.Kubectl.patch(ctx, v.fresh, object{"spec": withPolicy("Delete")})
	}
	return "the end of PersistentVolume " + v.fresh.name(), nil
}

// endUndoing removes the plan. If the namespace is gone, the volume keeps the policy Retain.
func (r *run) endUndoing(ctx context.Context, v view) (string, error) {
	p := v.plan
	switch {
	case v.namespaceGone:
		r.log("the namespace %s is gone; PersistentVolume %s has the disk %s, and keeps the reclaim "+
			"policy Retain", p.Namespace, p.Old, p.Handle)
		return "", r.Kubectl.patch(ctx, v.old, annotate(planKey, nil,
			reserve(p.Claim, p.ClaimUID))) // no claim has this UID any more
	case v.claim.deleting() || !v.bound(v.claim, v.old):
		return "", fmt.Errorf("PersistentVolumeClaim %s is being deleted, or is gone; its disk is kept. "+
			"Repeat the command with --undo, which makes it again after %s", p.path(), v.end(v.claim))
	case v.claim.annotation(planKey) != "":
		return "", r.Kubectl.patch(ctx, v.claim, annotate(planKey, nil, nil))
	}
	return "", r.Kubectl.unrecord(ctx, v, p.Policy)
}

func (k Kubectl) unrecord(ctx context.Context, v view, policy string) error {
	return k.patch(ctx, v.old, annotate(planKey, nil, withPolicy(policy)))
}
