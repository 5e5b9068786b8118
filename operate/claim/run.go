package claim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// run is one run of the command.
type run struct {
	Options
	// before is the event of the last refusal of the new disk before this run waited for it.
	before string

	id    string // of this run
	old   string // the name of the earlier PersistentVolume
	out   io.Writer
	asked bool // this run has asked for the new disk
	notes []string
	quota string // what the cluster publishes of the rack's quota
}

func (r *run) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

func (r *run) say(format string, args ...any) { _, _ = fmt.Fprintf(r.out, format+"\n", args...) }

// Run makes, continues, undoes or forgets a change, and says on out what it does before it does it.
func Run(ctx context.Context, o Options, out io.Writer) error {
	id := make([]byte, 4)
	_, _ = rand.Read(id)
	if o.Poll == 0 {
		o.Poll = time.Second
	}
	r := &run{Options: o, id: hex.EncodeToString(id), out: out}
	pv, p, err := r.find(ctx)
	if err != nil {
		return err
	}
	path := o.Namespace + "/" + o.Claim
	switch {
	case o.Verb == Forget && p == nil:
		r.say("nothing is kept of an earlier disk of %s", path)
		return nil
	case o.Verb == Forget:
		return r.forget(ctx, pv, *p)
	case p == nil && (o.Continue || o.Undo):
		r.say("no change of %s is under way", path)
		return nil
	case p == nil:
		return r.begin(ctx, nil, plan{})
	case p.Undone && o.Continue:
		r.say("no change of %s is under way: the last one was undone", path)
		return nil
	case p.Undone && o.Undo:
		return r.endUndone(ctx, pv, *p)
	case p.Undone:
		return r.begin(ctx, pv, *p)
	case p.Verb != o.Verb:
		return fmt.Errorf("the change of %s that is under way is a %s, not a %s", path, p.Verb, o.Verb)
	case !o.Continue && !o.Undo && p.Finished:
		return fmt.Errorf("the disk before the last change of %s is still kept (PersistentVolume %s): "+
			"end that with claim forget", path, p.Old)
	case !o.Continue && !o.Undo:
		return fmt.Errorf("a change of %s is under way already (%s, recorded on PersistentVolume %s): "+
			"repeat the command with --continue or with --undo", path, p.Verb, p.Old)
	case p.Undo && o.Continue:
		return errors.New("the change is being undone, which only --undo completes")
	}
	return r.resume(ctx, pv, *p)
}

// begin checks, shows and records a new change, and makes it. If an earlier change was undone on a
// PersistentVolume and a disk of it may still come, the new change looks for it, too.
func (r *run) begin(ctx context.Context, undoneOn object, undone plan) error {
	p, old, err := r.check(ctx)
	if err != nil {
		return err
	}
	if undoneOn != nil && undoneOn.name() != old.name() {
		return fmt.Errorf("a change of %s/%s was undone when the claim had PersistentVolume %s, and a "+
			"disk of it may still come: end that with claim forget", p.Namespace, p.Claim, undoneOn.name())
	}
	p.Late, p.LateSince = undone.Late, undone.LateSince
	r.describe(p)
	if r.DryRun {
		r.show(view{plan: &p}, false)
		return nil
	}
	r.old = old.name()
	if err := r.save(ctx, old, p, object{"persistentVolumeReclaimPolicy": "Retain"}); err != nil {
		return fmt.Errorf("the plan could not be recorded, and nothing has been changed: %w", err)
	}
	return r.forward(ctx)
}

// resume takes a change over from an earlier run, in either direction.
func (r *run) resume(ctx context.Context, pv object, p plan) error {
	r.old = pv.name()
	r.id, p.Run = p.Run, r.id // look accepts the earlier run's plan
	v, err := r.look(ctx)
	if err != nil {
		return err
	}
	r.id = p.Run
	if r.Undo && !p.Undo && (v.passed() || p.Finished) {
		return fmt.Errorf("the point of no return has been passed: %s/%s has, or had, the new disk, "+
			"which may have been written since. Complete it with --continue. The earlier disk is in "+
			"PersistentVolume %s until claim forget", p.Namespace, p.Claim, p.Old)
	}
	if r.DryRun {
		r.show(v, r.Undo)
		return nil
	}
	p.Undo = p.Undo || r.Undo
	// A controller of Kubernetes may change the status of the PersistentVolume at the same time.
	for try := 1; ; try++ {
		if err = r.save(ctx, v.old, p, nil); err == nil {
			break
		}
		if v.old, _ = r.get(ctx, persistentVolumes, "", r.old); try == attempts || v.old == nil ||
			v.old.annotation(planKey) != pv.annotation(planKey) {
			return fmt.Errorf("the change could not be taken over: %w", err)
		}
	}
	if p.Undo {
		return r.backward(ctx)
	}
	return r.forward(ctx)
}

// describe says what a change means as a whole.
func (r *run) describe(p plan) {
	r.say("%s of PersistentVolumeClaim %s/%s: from %s to %s", p.Verb, p.Namespace, p.Claim, p.OldSize,
		p.Size)
	_, peak := p.peak()
	r.say("The rack's quota needs room for %s beside what is used, until claim forget. %s The "+
		"namespace's quota needs room for another claim of %s until the step release.", peak, r.quota,
		p.Size)
	r.say("The workload is stopped from the step stop to the step start. The rack copies nothing " +
		"for a snapshot or a new disk, so this takes as long as stop, unmount, attach and mount: about " +
		"a minute, and a stop of the node more on a rack without hot-plug.")
	if p.Owner.Kind == "StatefulSet" {
		r.say("note: the volumeClaimTemplates of %s keep their size: a replica that is added later "+
			"gets a disk of that size. To change it, delete the StatefulSet with --cascade=orphan and "+
			"apply it with the new size.", p.Owner)
	}
	for _, n := range r.notes {
		r.say("note: %s", n)
	}
}

// show prints the steps, and which have been done.
func (r *run) show(v view, undo bool) {
	for i, s := range steps {
		state := ""
		if v.old != nil && s.done(v) {
			state = " [done]"
		}
		r.say("%d/%d %s: %s%s", i+1, len(steps), s.name, s.says(*v.plan), state)
	}
	if undo {
		r.say("The steps are undone in this order: %s.", strings.Join(undoing, ", "))
	}
}

// forward makes the steps that have not been done.
func (r *run) forward(ctx context.Context) error {
	for i, s := range steps {
		title := fmt.Sprintf("%d/%d %s: ", i+1, len(steps), s.name)
		if err := r.until(ctx, title, s.says, s.done, s.do, false); err != nil {
			return fmt.Errorf("step %s: %w", s.name, err)
		}
	}
	r.say("%s/%s has its new disk. The earlier one is kept in PersistentVolume %s. When all is "+
		"well, end that: oxide-csi-plugin claim forget %[1]s/%[2]s", r.Namespace, r.Claim, r.old)
	return nil
}

// backward undoes the steps.
func (r *run) backward(ctx context.Context) error {
	// A run that was killed may still have a request under way. It has read the claim before it was
	// marked here, so the API server refuses it.
	if err := r.until(ctx, "undo: ", func(plan) string { return "take the change over" },
		steps[0].done, (*run).mark, false); err != nil {
		return err
	}
	for _, name := range undoing {
		i := slices.IndexFunc(steps, func(s step) bool { return s.name == name })
		s := steps[i]
		says := func(plan) string { return "undo " + s.name }
		title := fmt.Sprintf("%d/%d ", i+1, len(steps))
		if err := r.until(ctx, title, says, s.undone, s.undo, i == 0); err != nil {
			return fmt.Errorf("undo %s: %w", s.name, err)
		}
	}
	r.say("%s/%s is as it was.", r.Namespace, r.Claim)
	return r.sayLate(ctx)
}

// sayLate says which disks may still come of an undone change.
func (r *run) sayLate(ctx context.Context) error {
	pv, err := r.get(ctx, persistentVolumes, "", r.old)
	if err != nil {
		return err
	}
	p, err := planOf(pv)
	if err != nil || p == nil {
		return err
	}
	r.say("The provisioner may still make a disk for the temporary claim, which was deleted. Its "+
		"StorageClass has the reclaim policy Retain, so the disk would stay, in PersistentVolume %s. "+
		"End that later: oxide-csi-plugin claim forget %s/%s", volumesOf(p.Late), r.Namespace, r.Claim)
	return nil
}

func volumesOf(claimUIDs []string) string {
	var all []string
	for _, uid := range claimUIDs {
		all = append(all, volumeOf(uid))
	}
	return strings.Join(all, ", ")
}

// endUndone deletes the disks of an undone change that came late. Forget also ends the change, if
// no more disks can be expected.
func (r *run) endUndone(ctx context.Context, pv object, p plan) error {
	r.old, r.id = pv.name(), p.Run
	v, err := r.look(ctx)
	if err != nil {
		return err
	}
	if r.Verb == Forget {
		if err := r.tooEarly(v); err != nil {
			return err
		}
	}
	if len(v.late) > 0 {
		r.say("PersistentVolume %s, which came after the change was undone, is deleted with its disk",
			names(v.late))
	}
	if r.DryRun {
		return nil
	}
	waitsOn := func(v view) bool {
		return r.Verb != Forget && len(v.late) == 0 && len(v.plan.Late) > 0
	}
	err = r.until(ctx, "", func(plan) string { return "end the change" }, waitsOn,
		func(r *run, ctx context.Context, v view) (string, error) {
			if len(v.late) > 0 {
				return "", r.sweep(ctx, v)
			}
			return "", r.patch(ctx, v.old, object{"metadata": annotations(map[string]any{planKey: nil})})
		}, true)
	if err != nil {
		return err
	}
	return r.sayLate(ctx)
}

// sweep has Kubernetes delete a disk that came late. It holds what the snapshot holds, and nobody
// has written it: its claim was deleted before it was bound.
func (r *run) sweep(ctx context.Context, v view) error {
	p, pv := *v.plan, v.late[0]
	if err := r.patch(ctx, pv, object{
		"spec": object{"persistentVolumeReclaimPolicy": "Delete"}}); err != nil {
		return err
	}
	p.Late = slices.DeleteFunc(slices.Clone(p.Late), func(uid string) bool {
		return volumeOf(uid) == pv.name()
	})
	return r.save(ctx, v.old, p, nil)
}

// tooEarly returns an error while a disk may still come that nobody would find after forget. The
// provisioner shows nowhere that it has given up, so this is a matter of time.
func (r *run) tooEarly(v view) error {
	left := r.Timeout - time.Since(v.plan.LateSince)
	if len(v.late) == len(v.plan.Late) || left <= 0 {
		return nil
	}
	return fmt.Errorf("the provisioner may still make PersistentVolume %s, of a change that was "+
		"undone: repeat the command in %s, or with a shorter --timeout if you know that it has given "+
		"up. Nothing has been forgotten", volumesOf(v.plan.Late), left.Round(time.Second))
}

// attempts is how often in a row a change is tried that fails because a controller of Kubernetes
// has changed the object at the same time, and a look that fails.
const attempts = 5

// until calls act with the state of the cluster until it is reached, or, if this ends the change,
// until there is no plan any more. The timeout is that of the waiting: it cuts off no request.
func (r *run) until(ctx context.Context, title string, says func(plan) string,
	reached func(view) bool, act func(*run, context.Context, view) (string, error), ends bool) error {
	late := time.After(r.Timeout)
	said, failed, announced := "", 0, false
	for {
		waits := ""
		v, err := r.look(ctx)
		switch {
		case err != nil && v.plan != nil && v.plan.Run != r.id: // another run has taken over
			return err
		case err != nil: // such as an API server that is restarted
		case v.plan == nil && ends:
			return nil
		case v.plan == nil:
			return fmt.Errorf("the plan on PersistentVolume %s is gone", r.old)
		case reached(v):
			return nil
		default:
			if !announced {
				r.say("%s%s", title, says(*v.plan))
			}
			announced = true
			waits, err = act(r, ctx, v)
		}
		if failed++; err == nil {
			failed = 0
		} else if failed == attempts || ctx.Err() != nil {
			return err
		}
		if waits != "" && waits != said {
			r.say("    waits for %s", waits)
			said = waits
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-late:
			if err != nil {
				return err
			}
			how := "--continue, or with --undo"
			if v.plan.Undo {
				how = "--undo"
			} else if v.passed() {
				how = "--continue"
			}
			return fmt.Errorf("waited %s for %s; repeat the command with %s", r.Timeout, said, how)
		case <-time.After(r.Poll):
		}
	}
}

// forget ends a change: what was kept of the earlier disk goes the way of its reclaim policy.
func (r *run) forget(ctx context.Context, pv object, p plan) error {
	path := p.Namespace + "/" + p.Claim
	if p.Undone {
		return r.endUndone(ctx, pv, p)
	}
	if !p.Finished {
		return fmt.Errorf("the change of %s is not complete: repeat %s with --continue or --undo", path,
			p.Verb)
	}
	r.old, r.id = pv.name(), p.Run
	v, err := r.look(ctx)
	if err != nil {
		return err
	}
	if v.fresh == nil || !v.replaced() || v.claim.str("status", "phase") != "Bound" ||
		v.claim.deleting() {
		return fmt.Errorf("the claim %s is not bound to PersistentVolume %s any more, or is being "+
			"deleted: look first. Nothing has been forgotten. To end it by hand, keep the "+
			"PersistentVolume that you need (%[2]s or %s), delete VolumeSnapshot %s if it is not needed, "+
			"give %[3]s its reclaim policy %s back, and remove its annotation %s", path, p.New, p.Old,
			p.Snapshot, p.Policy, planKey)
	}
	if p.Owner.Kind == "" && !v.mounted() {
		return fmt.Errorf("the new disk of %s has not been used yet: start its workload, and repeat "+
			"the command while it runs", path)
	}
	if err := r.tooEarly(v); err != nil {
		return err
	}
	what := fmt.Sprintf("PersistentVolume %s gets the reclaim policy %s back", p.Old, p.Policy)
	if p.Policy == "Delete" {
		what += ", and is deleted with its disk " + p.Handle
	}
	if p.SnapshotClass != "" {
		what += "; VolumeSnapshot " + p.Snapshot + " is deleted"
	}
	r.say("%s", what)
	if r.DryRun {
		return nil
	}
	says := func(plan) string { return "forget" }
	return r.until(ctx, "", says, never, func(r *run, ctx context.Context, v view) (string, error) {
		switch {
		case len(v.late) > 0:
			return "", r.sweep(ctx, v)
		case v.fresh.annotation(replacesKey) != "":
			return "", r.patch(ctx, v.fresh,
				object{"metadata": annotations(map[string]any{replacesKey: nil})})
		case p.SnapshotClass != "" && v.shot != nil:
			return "the end of VolumeSnapshot " + p.Snapshot, r.remove(ctx, v.shot)
		}
		return "", r.patch(ctx, v.old, object{"metadata": annotations(map[string]any{planKey: nil}),
			"spec": object{"persistentVolumeReclaimPolicy": p.Policy}})
	}, true)
}
