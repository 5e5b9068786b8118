package claim

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// step is one step of a change. do and undo look at the state and make at most one change towards
// done and undone; they are called again with the state after it. If there is nothing to do but to
// wait, they return what for. A step without undo is undone by that of another one.
type step struct {
	name   string
	says   func(p plan) string
	done   func(v view) bool
	do     func(r *run, ctx context.Context, v view) (waits string, err error)
	undone func(v view) bool
	undo   func(r *run, ctx context.Context, v view) (waits string, err error)
}

// never is for what ends with the plan itself.
func never(view) bool { return false }

// steps are the steps of a change, in their order. The last one is the point of no return: it makes
// the claim for the new disk, and nobody can tell any more whether the new disk has been written.
var steps = []step{
	{
		name: "record",
		says: func(p plan) string {
			return fmt.Sprintf("record the plan on PersistentVolume %s (%s, disk %s), which gets the "+
				"reclaim policy Retain (now %s), and mark the claim", p.Old, p.OldSize, p.Handle, p.Policy)
		},
		done:   func(v view) bool { return !v.original() || v.claim.annotation(planKey) == v.plan.Run },
		do:     (*run).mark,
		undone: func(v view) bool { return v.plan.Undone },
		undo:   (*run).unrecord,
	},
	{
		name:   "stop",
		says:   saysStop,
		done:   func(v view) bool { return v.plan.Stopped },
		do:     (*run).stop,
		undone: func(v view) bool { return !v.scaledDown() },
		undo: func(r *run, ctx context.Context, v view) (string, error) {
			return "", r.scaleUp(ctx, *v.plan)
		},
	},
	{
		name: "snapshot",
		says: func(p plan) string {
			if p.Verb == Revert {
				return fmt.Sprintf("use VolumeSnapshot %s, which is ready", p.Snapshot)
			}
			return fmt.Sprintf("take VolumeSnapshot %s of class %s", p.Snapshot, p.SnapshotClass)
		},
		done: func(v view) bool {
			return v.plan.New != "" || v.shot.at("status", "readyToUse") == true
		},
		do:     (*run).takeSnapshot,
		undone: func(v view) bool { return v.plan.SnapshotClass == "" || v.shot == nil },
		undo: func(r *run, ctx context.Context, v view) (string, error) {
			return "the end of VolumeSnapshot " + v.plan.Snapshot, r.remove(ctx, v.shot)
		},
	},
	{
		name: "disk",
		says: func(p plan) string {
			near := ""
			if p.Node != "" {
				near = " near node " + p.Node
			}
			return fmt.Sprintf("make a disk of %s from the snapshot%s, for PersistentVolumeClaim %s", p.Size,
				near, p.Temporary)
		},
		done: func(v view) bool {
			return v.plan.New != "" || v.fresh != nil && v.temporary.str("status", "phase") == "Bound"
		},
		do: (*run).makeDisk,
		undone: func(v view) bool {
			return v.temporary == nil && v.fresh == nil && v.foreign == nil
		},
		undo: (*run).removeDisk,
	},
	{
		name: "keep",
		says: func(plan) string {
			return "give the new PersistentVolume the reclaim policy Retain, and record its name"
		},
		done: func(v view) bool { return v.plan.New != "" },
		do:   (*run).keepDisk,
	},
	{
		name: "release",
		says: func(p plan) string {
			return fmt.Sprintf("delete PersistentVolumeClaim %s and %s; both PersistentVolumes stay",
				p.Claim, p.Temporary)
		},
		done: func(v view) bool { return v.passed() || v.claim == nil && v.temporary == nil },
		do:   (*run).release,
		undone: func(v view) bool {
			return v.claim.str("spec", "volumeName") == v.plan.Old && !v.claim.deleting() &&
				v.claim.str("status", "phase") == "Bound"
		},
		undo: (*run).restore,
	},
	{
		name: "bind",
		says: func(p plan) string {
			return fmt.Sprintf("reserve the new PersistentVolume for %s/%s", p.Namespace, p.Claim)
		},
		done: func(v view) bool {
			return v.passed() || v.fresh.str("spec", "claimRef", "name") == v.plan.Claim
		},
		do: func(r *run, ctx context.Context, v view) (string, error) {
			if err := v.guard(); err != nil {
				return "", err
			}
			return "", r.patch(ctx, v.fresh, object{"spec": reserve(v.plan.Claim)})
		},
	},
	{
		name: "start",
		says: func(p plan) string {
			how := "wait until you have started the workload"
			switch {
			case p.Owner.Resource != "":
				how = fmt.Sprintf("scale %s back to %d", p.Owner, p.Owner.Replicas)
			case p.Owner.Kind == "":
				how = "start nothing, because nothing used the claim"
			}
			return fmt.Sprintf("POINT OF NO RETURN: make PersistentVolumeClaim %s again, of %s, for the "+
				"new PersistentVolume, with its labels, annotations and owners; %s; when it runs, give the "+
				"new PersistentVolume the reclaim policy %s", p.Claim, p.Size, how, p.Policy)
		},
		done: func(v view) bool { return v.plan.Finished },
		do:   (*run).start,
	},
}

// undoing has the steps that are undone, in that order. The workload is started as soon as it has
// its claim: it need not wait until the rack has deleted the new disk and the snapshot.
var undoing = []string{"release", "stop", "disk", "snapshot", "record"}

// reserve returns the part of a PersistentVolume's spec that reserves it for a claim that is to be
// made.
func reserve(claim string) object {
	return object{"claimRef": object{"name": claim, "uid": nil, "resourceVersion": nil}}
}

func (r *run) mark(ctx context.Context, v view) (string, error) {
	return "", r.patch(ctx, v.claim, object{
		"metadata": annotations(map[string]any{planKey: v.plan.Run})})
}

func (r *run) unrecord(ctx context.Context, v view) (string, error) {
	if v.claim.deleting() || v.claim.str("spec", "volumeName") != v.plan.Old {
		return "", fmt.Errorf("PersistentVolumeClaim %s/%s is being deleted, or is gone; so that its "+
			"disk is not lost with it, PersistentVolume %s keeps the reclaim policy Retain",
			v.plan.Namespace, v.plan.Claim, v.plan.Old)
	}
	p := *v.plan
	switch {
	case p.Retains && p.New == "" && p.TemporaryUID != "":
		p.Late, p.TemporaryUID = append(slices.Clone(p.Late), p.TemporaryUID), ""
		return "", r.save(ctx, v.old, p, nil)
	case len(v.late) > 0:
		return "", r.sweep(ctx, v)
	case v.claim.annotation(planKey) != "":
		return "", r.patch(ctx, v.claim, object{"metadata": annotations(map[string]any{planKey: nil})})
	case len(p.Late) > 0:
		p.Undone, p.LateSince = true, time.Now()
		return "", r.save(ctx, v.old, p, object{"persistentVolumeReclaimPolicy": p.Policy})
	}
	return "", r.patch(ctx, v.old, object{"metadata": annotations(map[string]any{planKey: nil}),
		"spec": object{"persistentVolumeReclaimPolicy": v.plan.Policy}})
}

func saysStop(p plan) string {
	then := ", and wait until no node has the disk mounted"
	switch {
	case p.Owner.Kind == "":
		return "nothing uses the claim now; leave it so" + then
	case p.Owner.Resource == "":
		return fmt.Sprintf("wait until you have stopped %s, which uses the claim (pod %s), as its "+
			"manager wants it%s", p.Owner, p.Owner.Pod, then)
	case p.Owner.Target > 0:
		then = fmt.Sprintf("; the pods below %s run on%s", p.Owner.Pod, then)
	}
	return fmt.Sprintf("scale %s from %d to %d%s", p.Owner, p.Owner.Replicas, p.Owner.Target, then)
}

// scaledDown reports whether the owner has the scale that stop gave it.
func (v view) scaledDown() bool {
	return v.workload != nil && v.workload.num("spec", "replicas") == v.plan.Owner.Target
}

func (r *run) scaleUp(ctx context.Context, p plan) error {
	_, err := r.Kubectl(ctx, nil, r.scale(p, p.Owner.Target, p.Owner.Replicas)...)
	return err
}

func (r *run) stop(ctx context.Context, v view) (string, error) {
	p := *v.plan
	switch {
	case v.workload != nil && v.workload.num("spec", "replicas") > p.Owner.Target:
		_, err := r.Kubectl(ctx, nil, r.scale(p, v.workload.num("spec", "replicas"),
			p.Owner.Target)...)
		return "", err
	case len(v.users) > 0 && p.Owner.Resource == "":
		return fmt.Sprintf("you to stop %s: the claim is used by %s", p.Owner, names(v.users)), nil
	case len(v.users) > 0:
		return "the end of " + names(v.users), nil
	}
	nodes, err := r.all(ctx, "nodes", "")
	if err != nil {
		return "", err
	}
	for _, n := range nodes {
		// The kubelet lists a volume here before it mounts it, and until it has unmounted it. A disk
		// that is unmounted and still attached is complete, and need not be detached: a rack without
		// hot-plug stops the node for that.
		used, _ := n.at("status", "volumesInUse").([]any)
		if slices.Contains(used, any("kubernetes.io/csi/"+volume.DriverName+"^"+p.Handle)) {
			return "node " + n.name() + " to unmount the disk", nil
		}
	}
	p.Stopped, p.Generation = true, v.workload.num("metadata", "generation")
	return "", r.save(ctx, v.old, p, nil)
}

func (r *run) takeSnapshot(ctx context.Context, v view) (string, error) {
	p := v.plan
	switch {
	case v.shot == nil && p.SnapshotClass == "":
		return "", fmt.Errorf("the VolumeSnapshot %s is gone; repeat the command with --undo", p.Snapshot)
	case v.shot == nil:
		if err := v.guard(); err != nil {
			return "", err
		}
		return "", r.create(ctx, object{"apiVersion": "snapshot.storage.k8s.io/v1",
			"kind": "VolumeSnapshot", "metadata": object{"name": p.Snapshot, "namespace": p.Namespace,
				"annotations": map[string]any{planKey: p.Old}},
			"spec": object{"volumeSnapshotClassName": p.SnapshotClass,
				"source": object{"persistentVolumeClaimName": p.Claim}}})
	case v.shot.str("status", "error", "message") != "":
		return "VolumeSnapshot " + p.Snapshot + ": " + v.shot.str("status", "error", "message"), nil
	}
	return "VolumeSnapshot " + p.Snapshot, nil
}

func (r *run) makeDisk(ctx context.Context, v view) (string, error) {
	p := *v.plan
	switch {
	case v.temporary == nil && p.TemporaryUID != "":
		return "", fmt.Errorf("PersistentVolumeClaim %s was deleted, and its disk may still come; "+
			"repeat the command with --undo", p.Temporary)
	case v.temporary == nil:
		if err := v.guard(); err != nil {
			return "", err
		}
		r.asked = true
		return "", r.create(ctx, p.temporaryClaim())
	case p.TemporaryUID == "":
		p.TemporaryUID = v.temporary.uid()
		return "", r.save(ctx, v.old, p, nil)
	case v.foreign != nil:
		return "", fmt.Errorf("PersistentVolumeClaim %s was bound to PersistentVolume %s, which was not "+
			"made for it; repeat the command with --undo", p.Temporary, v.foreign.name())
	}
	why, event, err := r.refusal(ctx, p)
	if err != nil {
		return "", err
	}
	if p.Node != "" && v.temporary.annotation(selectedNode) == "" {
		// The provisioner takes the node away when the rack has no room.
		if r.asked {
			return "", fmt.Errorf("the new disk could not be made: %s. Repeat the command with "+
				"--continue when that is solved, or with --undo", why)
		}
		r.asked, r.before = true, event
		return "", r.patch(ctx, v.temporary, object{
			"metadata": annotations(map[string]any{selectedNode: p.Node})})
	}
	// Without a topology, or if the class waits for no pod, the provisioner tries again itself. The
	// workload is stopped, so a person has to know.
	if !r.asked {
		r.asked, r.before = true, event
	} else if event != r.before && strings.Contains(why, string(csierr.RackFull)+":") {
		return "", fmt.Errorf("the new disk could not be made: %s. Repeat the command with "+
			"--continue when that is solved, or with --undo", why)
	}
	if why != "" {
		why = " (last refusal: " + why + ")"
	}
	return "the new disk" + why, nil
}

// refusal returns the last message of the provisioner about the temporary claim, or "", and which
// event has it.
func (r *run) refusal(ctx context.Context, p plan) (why, event string, err error) {
	events, err := r.all(ctx, "events", p.Namespace, "--field-selector=type=Warning,"+
		"involvedObject.kind=PersistentVolumeClaim,involvedObject.name="+p.Temporary)
	last := ""
	for _, e := range events {
		if at := e.str("lastTimestamp"); at >= last {
			last, why = at, e.str("message")
			event = fmt.Sprint(e.name(), " ", at, " ", e.num("count")) // a repetition is counted
		}
	}
	return csierr.Plain(why), event, err
}

func (r *run) keepDisk(ctx context.Context, v view) (string, error) {
	p := *v.plan
	if v.fresh.annotation(replacesKey) == "" {
		return "", r.patch(ctx, v.fresh, object{
			"metadata": annotations(map[string]any{replacesKey: p.Old}),
			"spec":     object{"persistentVolumeReclaimPolicy": "Retain"}})
	}
	p.New, p.TemporaryUID = v.fresh.name(), v.temporary.uid()
	return "", r.save(ctx, v.old, p, nil)
}

// removeDisk has Kubernetes delete the new disk, which nobody has written: its PersistentVolume
// belongs to the temporary claim again, and goes with it.
func (r *run) removeDisk(ctx context.Context, v view) (string, error) {
	// The provisioner takes the node away from a claim when it has given up.
	asked := v.temporary.uid()
	if v.plan.Node != "" && v.temporary.annotation(selectedNode) == "" {
		asked = ""
	}
	switch p := *v.plan; {
	case v.foreign != nil && v.foreign.str("spec", "persistentVolumeReclaimPolicy") != "Retain":
		return "", fmt.Errorf("PersistentVolume %s, which was not made for PersistentVolumeClaim %s, "+
			"would be deleted with it: give it the reclaim policy Retain, and repeat the command",
			v.foreign.name(), p.Temporary)
	case v.fresh != nil && p.New == "":
		p.New, p.TemporaryUID = v.fresh.name(), v.fresh.str("spec", "claimRef", "uid")
		return "", r.save(ctx, v.old, p, nil)
	case v.fresh != nil && (v.fresh.str("spec", "persistentVolumeReclaimPolicy") != "Delete" ||
		v.fresh.str("spec", "claimRef", "name") != p.Temporary):
		return "", r.patch(ctx, v.fresh, object{"spec": object{"persistentVolumeReclaimPolicy": "Delete",
			"claimRef": object{"name": p.Temporary, "uid": p.TemporaryUID}}})
	case v.temporary != nil && p.New == "" && v.foreign == nil && p.TemporaryUID != asked:
		// A disk that comes after the claim is gone is found by the claim's UID.
		p.TemporaryUID = asked
		return "", r.save(ctx, v.old, p, nil)
	case v.temporary != nil:
		return "the end of PersistentVolumeClaim " + p.Temporary, r.remove(ctx, v.temporary)
	}
	return "the end of PersistentVolume " + v.fresh.name(), nil
}

func (r *run) release(ctx context.Context, v view) (string, error) {
	if err := v.guard(); err != nil {
		return "", err
	}
	for _, c := range []object{v.claim, v.temporary} {
		if c != nil {
			return "the end of PersistentVolumeClaim " + c.name(), r.remove(ctx, c)
		}
	}
	return "", nil
}

// restore makes the earlier claim again.
func (r *run) restore(ctx context.Context, v view) (string, error) {
	p := v.plan
	switch {
	case v.claim.deleting():
		return "the end of PersistentVolumeClaim " + p.Claim + ", used by " + names(v.users), nil
	case v.claim != nil && v.claim.str("spec", "volumeName") != p.Old:
		return "", fmt.Errorf("another PersistentVolumeClaim %s/%s has been made meanwhile; if it "+
			"holds nothing, delete it, and repeat the command", p.Namespace, p.Claim)
	case v.claim != nil:
		return "PersistentVolumeClaim " + p.Claim + " to be bound", nil
	case v.old.str("spec", "claimRef", "uid") != "":
		return "", r.patch(ctx, v.old, object{"spec": reserve(p.Claim)})
	}
	spec, _ := p.Manifest["spec"].(map[string]any)
	return "", r.createOwned(ctx, p.claimOf(p.Claim, spec, nil))
}

func (r *run) start(ctx context.Context, v view) (string, error) {
	p := *v.plan
	switch {
	case !p.Started && !v.replaced():
		if err := v.guard(); err != nil {
			return "", err
		}
		p.Started = true
		return "", r.save(ctx, v.old, p, nil)
	case v.fresh == nil:
		return "", fmt.Errorf("PersistentVolume %s is gone, and the new disk may be gone with it; the "+
			"earlier disk is in PersistentVolume %s, which keeps the reclaim policy Retain. To go back to "+
			"it by hand, delete PersistentVolumeClaim %s/%s, remove the uid from the claimRef of %[2]s, "+
			"make the claim again with volumeName %[2]s, and remove the annotation %[5]s from %[2]s", p.New,
			p.Old, p.Namespace, p.Claim, planKey)
	case v.claim == nil && v.fresh.str("spec", "claimRef", "uid") != "":
		return "", r.patch(ctx, v.fresh, object{"spec": reserve(p.Claim)}) // it was deleted since
	case v.claim == nil:
		meta, _ := p.Manifest.at("metadata", "annotations").(map[string]any)
		earlier := p.Handle
		if text, _ := meta[earlierKey].(string); text != "" {
			earlier = text + "," + p.Handle
		}
		return "", r.createOwned(ctx, p.claimOf(p.Claim, p.spec(object{"volumeName": p.New}),
			map[string]any{earlierKey: earlier}))
	case v.claim.deleting():
		return "", fmt.Errorf("PersistentVolumeClaim %s/%s is being deleted; so that its disk is not "+
			"lost with it, PersistentVolume %s keeps the reclaim policy Retain. When it is gone, repeat "+
			"the command with --continue, which makes it again", p.Namespace, p.Claim, p.New)
	case !v.replaced():
		return "", v.guard()
	case v.claim.str("status", "phase") != "Bound":
		return "PersistentVolumeClaim " + p.Claim + " to be bound", nil
	case v.scaledDown():
		return "", r.scaleUp(ctx, p)
	case p.Owner.Kind != "" && !v.mounted():
		return "a pod of " + p.Owner.String() + " to run with the new disk" +
			strings.TrimSuffix(", now "+names(v.users), ", now "), nil
	case v.fresh.str("spec", "persistentVolumeReclaimPolicy") != p.Policy:
		return "", r.patch(ctx, v.fresh, object{
			"spec": object{"persistentVolumeReclaimPolicy": p.Policy}})
	}
	p.Finished = true
	return "", r.save(ctx, v.old, p, nil)
}

// mounted reports whether a pod runs with the claim.
func (v view) mounted() bool {
	return slices.ContainsFunc(v.users, func(pod object) bool {
		return pod.str("status", "phase") == "Running"
	})
}
