// Package claim gives a claim another disk: a larger one, or one with the content of a snapshot of
// the claim. The claim keeps its name and its workload. A rack can neither resize nor revert a
// disk, so the command makes a new disk from a snapshot, deletes the claim and creates it again.
//
// Meanwhile no pod can use either disk, because each belongs to a claim that the command creates
// for itself: the earlier disk while the snapshot is taken, and the new disk until it has been
// checked. The point of no return is when Kubernetes first binds the new disk to the user's claim.
//
// A change is a table of steps. Each step reads from the cluster's objects whether it has been
// done, so the command can be killed at any time and repeated. The plan is an annotation of the
// earlier PersistentVolume; the command "claim forget" removes it. Each request names the UID and
// the resourceVersion of the object that it changes. So a late request of a killed run changes
// nothing. The command runs the user's kubectl, with the user's rights.
package claim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// The verbs of the command.
const (
	Grow   = "grow"
	Revert = "revert"
	Forget = "forget"
)

// Options are the command's arguments and flags.
type Options struct {
	Verb, Namespace, Claim string
	Size                   string // the size of the new disk; if empty, a revert keeps the size
	Snapshot               string // the VolumeSnapshot to which the claim is reverted
	SnapshotClass          string // the class of the snapshot for a growth; empty for the only class
	DryRun, Continue, Undo bool
	IgnoreCapacity         bool          // begin although too little capacity is published
	Timeout                time.Duration // the limit for each step

	Kubectl Kubectl
}

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Size, "size", "", "`SIZE` of the new disk, such as 200Gi")
	flags.StringVar(&o.Snapshot, "snapshot", "", "`NAME` of the VolumeSnapshot to revert to")
	flags.StringVar(&o.SnapshotClass, "snapshot-class", "", "`NAME` of the VolumeSnapshotClass, if "+
		"there are several")
	flags.BoolVar(&o.DryRun, "dry-run", false, "show the steps, and change nothing")
	flags.BoolVar(&o.IgnoreCapacity, "ignore-capacity", false, "begin although the cluster publishes "+
		"less capacity than the change needs")
	flags.BoolVar(&o.Continue, "continue", false, "go on with the change that is under way")
	flags.BoolVar(&o.Undo, "undo", false, "undo the change that is under way")
	flags.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "`DURATION` that a step may wait")
}

// Parse sets the verb and the claim from the arguments that are not flags, and checks all options.
func (o *Options) Parse(operands []string) error {
	if len(operands) == 2 {
		o.Verb = operands[0]
		o.Namespace, o.Claim, _ = strings.Cut(operands[1], "/")
	}
	resumes := o.Continue || o.Undo
	given := o.Size != "" || o.Snapshot != "" || o.SnapshotClass != "" || o.IgnoreCapacity
	switch {
	case len(operands) != 2 || o.Verb != Grow && o.Verb != Revert && o.Verb != Forget:
		return errors.New("expected grow, revert or forget, and NAMESPACE/NAME")
	case !kube.IsName(o.Namespace) || !kube.IsName(o.Claim):
		return errors.New("the claim has to be NAMESPACE/NAME")
	case o.Continue && o.Undo:
		return errors.New("--continue and --undo exclude each other")
	case (resumes || o.Verb == Forget) && given:
		return errors.New("the change that is under way has its size and its snapshot, and its " +
			"capacity has been checked: omit them")
	case o.Verb == Forget && resumes:
		return errors.New("forget can be repeated, and needs neither --continue nor --undo")
	case o.Timeout <= 0:
		return errors.New("--timeout has to be positive")
	case resumes || o.Verb == Forget:
		return nil
	case o.Verb == Grow && (o.Size == "" || o.Snapshot != ""):
		return errors.New("grow needs --size, and no --snapshot: it takes one")
	case o.Verb == Revert && (!kube.IsName(o.Snapshot) || o.SnapshotClass != ""):
		return errors.New("revert needs --snapshot, the name of a VolumeSnapshot of the claim, and " +
			"no --snapshot-class")
	case o.SnapshotClass != "" && !kube.IsName(o.SnapshotClass):
		return errors.New("--snapshot-class has to be the name of a VolumeSnapshotClass")
	case o.Size == "":
		return nil
	}
	if _, err := parseSize(o.Size); err != nil {
		return fmt.Errorf("--size: %w", err)
	}
	return nil
}

type run struct {
	Options
	before string // the last refusal's event before this run asked; only a later one counts

	id    string // the id of this run
	old   string // the name of the earlier PersistentVolume
	out   io.Writer
	asked bool  // this run has requested the new disk
	last  *plan // the plan as this run read it last
}

func (r *run) log(format string, args ...any) { _, _ = fmt.Fprintf(r.out, format+"\n", args...) }

func newID() string { return fmt.Sprintf("%08x", rand.Uint32()) }

// Run makes, continues, undoes or forgets a change. Before each step it describes the step on out.
func Run(ctx context.Context, o Options, out io.Writer) error {
	r := &run{Options: o, id: newID(), out: out}
	pv, p, err := r.find(ctx)
	if err != nil {
		return err
	}
	if err := r.sweep(ctx, p); err != nil {
		return err
	}
	path := o.Namespace + "/" + o.Claim
	switch {
	case o.Verb == Forget && p == nil:
		r.log("nothing is kept of an earlier disk of %s", path)
		return nil
	case o.Verb == Forget:
		return r.forget(ctx, pv, *p)
	case p == nil && (o.Continue || o.Undo):
		r.log("no change of %s is under way", path)
		return nil
	case p == nil:
		return r.begin(ctx)
	case p.Verb != o.Verb:
		return fmt.Errorf("the change of %s that is under way is a %s, not a %s", path, p.Verb, o.Verb)
	case !o.Continue && !o.Undo && p.Finished:
		return fmt.Errorf("the disk before the last change of %s is still kept (PersistentVolume %s): "+
			"end that with claim forget", path, p.Old)
	case !o.Continue && !o.Undo:
		return fmt.Errorf("a change of %s is under way already (%s, recorded on PersistentVolume %s): "+
			"repeat the command with --continue or with --undo", path, p.Verb, p.Old)
	}
	return r.resume(ctx, pv, *p)
}

// sweep deletes unbound claims that late requests of an earlier change have created.
func (r *run) sweep(ctx context.Context, p *plan) error {
	all, err := r.Kubectl.all(ctx, claims, r.Namespace)
	if err != nil {
		return err
	}
	for _, c := range all {
		path, id, _ := strings.Cut(c.annotation(changeKey), " ")
		late := plan{Namespace: r.Namespace, Claim: r.Claim, ID: id}
		if path != late.path() || p != nil && p.ID == id || c.name() != late.kept() ||
			c.str("status", "phase") == "Bound" || c.deleting() || r.DryRun {
			continue
		}
		r.log("delete PersistentVolumeClaim %s, which is left of an earlier change and has no disk",
			c.name())
		if err := r.Kubectl.remove(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) begin(ctx context.Context) error {
	c := &proposal{Options: r.Options, log: r.log}
	if err := c.check(ctx, r.id); err != nil {
		return err
	}
	c.describe()
	if r.DryRun {
		r.show(view{plan: &c.plan})
		return nil
	}
	r.old = c.old.name()
	if err := r.Kubectl.save(ctx, c.old, c.plan, withPolicy("Retain")); err != nil {
		return fmt.Errorf("the plan could not be recorded: %w. Nothing has been changed if the API "+
			"server has refused it; else repeat the command with --undo first", err)
	}
	return r.forward(ctx)
}

func (r *run) resume(ctx context.Context, pv object, p plan) error {
	r.old = pv.name()
	r.id, p.Run = p.Run, r.id // so that observe() accepts the earlier run's plan
	v, err := r.observe(ctx)
	switch r.id = p.Run; {
	case err != nil:
		return err
	case v.plan == nil:
		return r.planless()
	case r.Undo && v.passed():
		return v.tooLate()
	case p.Undo && r.Continue && !v.passed():
		return errors.New("the change is being undone: complete that with --undo")
	case r.DryRun:
		r.show(v)
		return nil
	}
	p = *v.plan // the earlier run may have changed the plan since find() read it
	p.Run, p.Undo = r.id, r.Undo
	// Repeat the save if a controller of Kubernetes changes the PersistentVolume's status meanwhile.
	for try := 1; ; try++ {
		if err = r.Kubectl.save(ctx, v.old, p, nil); err == nil {
			break
		}
		read := v.old.annotation(planKey)
		if v.old, _ = r.Kubectl.get(ctx, persistentVolumes, "", r.old); try == attempts || v.old == nil ||
			v.old.annotation(planKey) != read {
			return fmt.Errorf("the change could not be taken over: %w", err)
		}
	}
	if p.Undo {
		return r.backward(ctx)
	}
	return r.forward(ctx)
}

func (v view) tooLate() error {
	p := v.plan
	if v.fresh == nil {
		return fmt.Errorf("PersistentVolume %s is gone after it was handed over, and the new disk may "+
			"be gone with it; the earlier disk is in PersistentVolume %s, which keeps the reclaim policy "+
			"Retain. %s", p.New, p.Old, v.byHand())
	}
	return fmt.Errorf("the point of no return has been passed: %s has, or had, the new disk, which "+
		"may have been written since. Complete the change with --continue. The earlier disk is in "+
		"PersistentVolume %s until claim forget", p.path(), p.Old)
}

func (v view) byHand() string {
	p := v.plan
	return fmt.Sprintf("To go back to it by hand, delete the PersistentVolumeClaims %s and %s/%s if "+
		"they exist, remove the uid from the claimRef of %s and put the name %[5]s there, make the "+
		"claim again with volumeName %[4]s, and remove the annotation %[6]s from %[4]s", p.path(),
		p.Namespace, p.kept(), p.Old, p.Claim, planKey)
}

// planless returns the error for a change whose plan or earlier PersistentVolume is gone.
func (r *run) planless() error {
	text := fmt.Sprintf("the plan on PersistentVolume %s is gone", r.old)
	if p := r.last; p != nil {
		text += fmt.Sprintf(". The disk %s is the earlier one; make a PersistentVolume for it if there "+
			"is none (docs/howto/static-volumes.md). Look at the PersistentVolume %q, at the claims %s and "+
			"%s, and at %s, which had %d replicas", p.Handle, p.New, p.kept(), p.temporary(), p.Owner,
			p.Owner.Replicas)
	}
	return errors.New(text)
}

func (r *run) show(v view) {
	for i, s := range steps {
		state := ""
		if v.old != nil && s.done(v) {
			state = " [done]"
		}
		r.log("%d/%d %s: %s%s", i+1, len(steps), s.name, s.describe(*v.plan), state)
	}
}

func (r *run) forward(ctx context.Context) error {
	for i, s := range steps {
		if err := r.until(ctx, fmt.Sprintf("%d/%d %s: ", i+1, len(steps), s.name), s); err != nil {
			return fmt.Errorf("step %s: %w", s.name, err)
		}
	}
	r.log("%s/%s has its new disk. The earlier one is kept in PersistentVolume %s. When all is "+
		"well, end that: oxide-csi-plugin claim forget %[1]s/%[2]s", r.Namespace, r.Claim, r.old)
	return nil
}

func (r *run) backward(ctx context.Context) error {
	for _, s := range undoing {
		if err := r.until(ctx, "undo "+s.name+": ", s); err != nil {
			return fmt.Errorf("undo %s: %w", s.name, err)
		}
	}
	r.log("%s/%s is as it was.", r.Namespace, r.Claim)
	return nil
}

// attempts is the number of failed requests in a row after which a step fails. A request may fail
// because a controller of Kubernetes changes the object at the same time.
const attempts = 5

// until() repeats a step until the step is done. The timeout never interrupts a request.
func (r *run) until(ctx context.Context, title string, s step) error {
	late := time.After(r.Timeout)
	said, failed, announced := "", 0, false
	for {
		waits := ""
		v, err := r.observe(ctx)
		switch {
		case err != nil && v.plan != nil && v.plan.Run != r.id: // another run has taken over
			return err
		case err != nil: // for example because the API server restarts
		case v.plan == nil && s.done == nil:
			return nil
		case v.plan == nil:
			return r.planless()
		case v.plan.Undo && v.passed(): // the claim was bound when the undoing began
			return v.tooLate()
		case s.done != nil && s.done(v):
			return nil
		default:
			if !announced {
				r.log("%s%s", title, s.describe(*v.plan))
			}
			announced = true
			waits, err = s.do(r, ctx, v)
		}
		if failed++; err == nil {
			failed = 0
		} else if failed == attempts || ctx.Err() != nil {
			return v.repeatWith(err)
		}
		if waits != "" && waits != said {
			r.log("    waits for %s", waits)
			said = waits
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-late:
			if err == nil {
				err = fmt.Errorf("waited %s for %s", r.Timeout, said)
			}
			return v.repeatWith(err)
		case <-time.After(time.Second):
		}
	}
}

// repeatWith appends to an error how to repeat the command, unless the error already contains this.
func (v view) repeatWith(err error) error {
	how := "--continue, or with --undo"
	switch {
	case strings.Contains(err.Error(), "epeat the command"):
		return err
	case v.plan == nil:
	case v.plan.Undo:
		how = "--undo"
	case v.passed():
		how = "--continue"
	}
	return fmt.Errorf("%w; repeat the command with %s", err, how)
}

func (r *run) forget(ctx context.Context, pv object, p plan) error {
	if !p.Finished {
		return fmt.Errorf("the change of %s is not complete: repeat %s with --continue or --undo",
			p.path(), p.Verb)
	}
	r.old, r.id = pv.name(), p.Run
	v, err := r.observe(ctx)
	if err == nil {
		err = v.forgettable()
	}
	if err != nil {
		return err
	}
	what := fmt.Sprintf("PersistentVolume %s gets the reclaim policy %s back", p.Old, p.Policy)
	if p.Policy == "Delete" {
		what += ", and is deleted with its disk " + p.Handle
	}
	r.log("%s", what)
	if r.DryRun {
		return nil
	}
	return r.until(ctx, "", step{describe: func(plan) string { return "forget" },
		do: func(r *run, ctx context.Context, v view) (string, error) {
			if err := v.forgettable(); err != nil {
				return "", err
			}
			if v.fresh.annotation(replacesKey) != "" {
				return "", r.Kubectl.patch(ctx, v.fresh, annotate(replacesKey, nil, nil))
			}
			return "", r.Kubectl.unrecord(ctx, v, v.plan.Policy)
		}})
}

// forgettable returns why the earlier disk is still needed, or nil.
func (v view) forgettable() error {
	p := v.plan
	if p == nil || v.fresh == nil || v.claim.deleting() || !v.bound(v.claim, v.fresh) {
		return fmt.Errorf("the claim is not bound to its new PersistentVolume any more, or is being "+
			"deleted. Nothing has been forgotten. To end the change by hand, keep the PersistentVolume "+
			"that you need, give %s its reclaim policy back, and remove its annotation %s", v.old.name(),
			planKey)
	}
	if p.Owner.Kind == "" && !v.podRuns() {
		return fmt.Errorf("the new disk of %s has not been used yet: start its workload, and repeat "+
			"the command while it runs", p.path())
	}
	return v.prove()
}
