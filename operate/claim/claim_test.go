package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// options returns the options of a change on the cluster; args are as a user types them.
func (c *cluster) options(claim, verb string) Options {
	o := Options{Verb: verb, Namespace: "db", Claim: claim, Timeout: 20 * time.Second,
		Poll: time.Nanosecond, Kubectl: c.kubectl}
	switch verb {
	case Grow:
		o.Size = "20Gi"
	case Revert:
		o.Snapshot = "then"
	}
	return o
}

// run runs the command and returns what it says.
func (c *cluster) run(o Options) (string, error) {
	var out strings.Builder
	c.killed = false
	err := Run(c.t.Context(), o, &out)
	return out.String(), err
}

// dies runs the command, which is killed at its nth change, before or after it. It reports whether
// the command has so many changes.
func (c *cluster) dies(o Options, n int, after bool) bool {
	c.effects, c.killAt, c.after = 0, n, after
	_, err := c.run(o)
	c.killAt, c.killed = 0, false
	if err != nil && !errors.Is(err, errKilled) {
		c.t.Fatalf("killed at change %d: %v", n, err)
	}
	return err != nil
}

// settled makes passes until the cluster is quiet, and returns the state without what differs
// between equal objects.
func (c *cluster) settled() string {
	for c.pass(); !c.quiet(); {
		c.pass()
	}
	for range unmountsAfter {
		c.pass()
	}
	var all []string
	for _, o := range c.objects {
		text, _ := json.Marshal(o)
		var o object
		_ = json.Unmarshal(text, &o)
		meta := o["metadata"].(map[string]any)
		for _, key := range []string{"uid", "resourceVersion", "generation"} {
			delete(meta, key)
		}
		if notes, _ := meta["annotations"].(map[string]any); notes != nil {
			delete(notes, "pv.kubernetes.io/bind-completed")
			if delete(notes, selectedNode); len(notes) == 0 {
				delete(meta, "annotations")
			}
		}
		if ref, _ := o.at("spec", "claimRef").(map[string]any); ref != nil {
			delete(ref, "uid")
		}
		text, _ = json.MarshalIndent(o, "", " ")
		all = append(all, string(text))
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// quiet reports whether every wanted pod runs, and no disk is being made.
func (c *cluster) quiet() bool {
	return len(c.making) == 0 && !slices.ContainsFunc(c.of("Pod"), func(pod object) bool {
		return pod.str("status", "phase") != "Running" || pod.deleting()
	})
}

// content returns what the claim's disk holds, and its capacity.
func (c *cluster) content(claim string) (text, size string) {
	pv := c.named("PersistentVolume", "", c.named("PersistentVolumeClaim", "db", claim).
		str("spec", "volumeName"))
	return c.disks[pv.str("spec", "csi", "volumeHandle")], pv.str("spec", "capacity", "storage")
}

// figures are the counts of a test over all of its histories.
type figures struct{ kills, lost, orphans, stops, late int }

// story is one history: a change of a new cluster that is killed, and then completed or undone.
type story struct {
	c                     *cluster
	claim, verb           string
	before, held, earlier string
	disks                 int
}

func newStory(t *testing.T, kind, verb string) *story {
	c, claim := newCluster(t, kind)
	s := &story{c: c, claim: claim, verb: verb, before: c.settled(), disks: len(c.disks)}
	s.held, _ = c.content(claim)
	s.earlier = c.shots["then"]
	return s
}

// retains gives the class the reclaim policy Retain, and slows the provisioner down.
func (s *story) retains(slow int) {
	s.c.touch(s.c.named("StorageClass", "", "oxide-disk"), "Retain", "reclaimPolicy")
	s.c.settled()
	s.before, s.c.slow = s.c.settled(), slow
}

func (s *story) options() Options { return s.c.options(s.claim, s.verb) }

func (s *story) resumes(undo bool) Options {
	o := s.options()
	o.Size, o.Snapshot, o.Undo, o.Continue = "", "", undo, !undo
	return o
}

// completed checks that the claim has the right disk, forgets the earlier one, killed at each
// change of that, too, and checks that nothing else is left.
func (s *story) completed(f *figures) {
	c, t := s.c, s.c.t
	t.Helper()
	c.settled()
	text, size := c.content(s.claim)
	want, wantSize := s.held, "20Gi"
	if s.verb == Revert {
		want, wantSize = s.earlier, "10Gi"
	}
	if !strings.HasPrefix(text+" ", want+" ") || size != wantSize ||
		s.verb == Revert && strings.HasPrefix(text+" ", s.held+" ") {
		t.Fatalf("the disk holds %q of %s, want %q of %s", text, size, want, wantSize)
	}
	claim := c.named("PersistentVolumeClaim", "db", s.claim)
	if claim.str("metadata", "labels", "app") != "web" || claim.annotation("team") != "blue" ||
		claim.annotation(planKey) != "" {
		t.Fatalf("the claim is %v", claim)
	}
	f.stops = max(f.stops, c.stops)
	if s.verb == Revert { // forget gives these up
		c.written = slices.DeleteFunc(c.written, func(text string) bool {
			return strings.HasPrefix(text+" ", s.held+" ")
		})
	}
	for n := 1; c.dies(c.options(s.claim, Forget), n, n%2 == 0); n++ {
		f.kills++
	}
	c.settled()
	f.lost += c.lost
	f.orphans += len(c.disks) - s.disks + len(c.shots) - 1
	for _, pv := range c.of("PersistentVolume") {
		if pv.annotation(planKey)+pv.annotation(replacesKey) != "" || pv.str("spec",
			"persistentVolumeReclaimPolicy") != "Delete" {
			t.Fatalf("left: %v", pv)
		}
	}
}

// undone checks that all is as it was, after a disk that came late was forgotten.
func (s *story) undone(f *figures) {
	s.c.t.Helper()
	for s.c.settled(); s.plan() != nil && s.plan().Undone; s.c.settled() {
		s.endsUndone(f)
	}
	if diff := cmp.Diff(s.before, s.c.settled()); diff != "" {
		s.c.t.Fatalf("the cluster is not as it was (-before +now):\n%s", diff)
	}
	f.stops, f.lost = max(f.stops, s.c.stops), f.lost+s.c.lost
	f.orphans += len(s.c.disks) - s.disks + len(s.c.shots) - 1
}

// undoes undoes the change, and checks that everything is as it was.
func (s *story) undoes() {
	s.c.t.Helper()
	s.c.does(s.resumes(true))
	s.whole(s.undone)
}

// endsUndone ends an undone change, killed at each change of that, too.
func (s *story) endsUndone(f *figures) {
	s.c.t.Helper()
	f.late++
	for n := 1; s.c.dies(s.c.options(s.claim, Forget), n, n%2 == 0); n++ {
		f.kills++
		s.ages()
	}
}

// ages makes the change one that was undone an hour earlier.
func (s *story) ages() {
	for _, pv := range s.c.of("PersistentVolume") {
		if p, _ := planOf(pv); p != nil {
			p.LateSince = p.LateSince.Add(-time.Hour)
			text, _ := json.Marshal(p)
			s.c.touch(pv, string(text), "metadata", "annotations", planKey)
		}
	}
}

// does runs the command, which has to work, and returns what it says.
func (c *cluster) does(o Options) string {
	c.t.Helper()
	says, err := c.run(o)
	if err != nil {
		c.t.Fatalf("%v, after:\n%s", err, says)
	}
	return says
}

// refuses runs the command, which has to end with an error that has these words.
func (c *cluster) refuses(o Options, words string) {
	c.t.Helper()
	if says, err := c.run(o); err == nil || !strings.Contains(err.Error(), words) {
		c.t.Fatalf("got %v, want an error with %q, after:\n%s", err, words, says)
	}
}

// whole makes a check, and fails the test if bytes were lost or disks are left.
func (s *story) whole(check func(*figures)) {
	s.c.t.Helper()
	var f figures
	if check(&f); f.lost+f.orphans != 0 {
		s.c.t.Errorf("%+v", f)
	}
}

func TestAChangeIsContinuedOrUndoneAfterAKillAtEveryStep(t *testing.T) {
	var f figures
	for _, kind := range []string{"Deployment", "StatefulSet"} {
		for _, verb := range []string{Grow, Revert} {
			for _, after := range []bool{false, true} {
				killed := true
				for n := 1; killed; n++ {
					s := newStory(t, kind, verb)
					if killed = s.c.dies(s.options(), n, after); !killed {
						s.completed(&f)
						break
					}
					f.kills++
					if n == 1 && !after { // nothing has been recorded
						s.c.does(s.options())
					}
					s.c.does(s.resumes(false))
					s.completed(&f)
					// After a change is before the next one; and either verb covers its own steps of the
					// undoing.
					for _, slow := range slows {
						if after && (verb == Grow) == (kind == "Deployment") {
							undoneAfterKill(t, kind, verb, n, slow, &f)
						}
					}
				}
			}
		}
	}
	t.Logf("FIGURE claim-grow kills=%d bytes_lost=%d orphans=%d stops=%d", f.kills, f.lost, f.orphans,
		f.stops)
	if f.lost != 0 || f.orphans != 0 || f.stops != 1 || f.late == 0 {
		t.Errorf("%+v: want no lost bytes, no orphans, one stop of the workload, and late disks", f)
	}
}

// slows are for how many passes the provisioner works on a disk: it is done at once, during the
// undoing, or after it. A class whose policy is Retain keeps a disk that is made for no claim.
var slows = []int{0, 30, 300}

// undoneAfterKill kills the change at a step and then its undoing at every step.
func undoneAfterKill(t *testing.T, kind, verb string, n, slow int, f *figures) {
	t.Helper()
	for m := 1; ; m++ {
		s := newStory(t, kind, verb)
		if slow > 0 {
			s.retains(slow)
		}
		s.c.dies(s.options(), n, true)
		if slow > 0 && (s.temporary() == nil || s.plan().New != "") {
			return // the provisioner is not at work
		}
		if p := s.plan(); p != nil && p.Started {
			says, err := s.c.run(s.resumes(true))
			if err == nil || !strings.Contains(err.Error(), "point of no return") {
				t.Fatalf("%v, after:\n%s", err, says)
			}
			return
		}
		killed := s.c.dies(s.resumes(true), m, m%2 == 0)
		if killed {
			f.kills++
			_, err := s.c.run(s.resumes(false))
			if undoing := err != nil && strings.Contains(err.Error(), "being undone"); m > 2 && !undoing &&
				s.plan() != nil && !s.plan().Undone {
				t.Fatalf("a change that is being undone goes on: %v", err)
			} else if err == nil && s.c.named("PersistentVolumeClaim", "db", s.claim).
				annotation(earlierKey) != "" {
				continue // nothing had been undone yet, so it was continued
			}
			s.c.does(s.resumes(true))
		}
		s.undone(f)
		if !killed {
			return
		}
	}
}

// plan returns the plan that is recorded, or nil.
func (s *story) plan() (p *plan) {
	for _, pv := range s.c.of("PersistentVolume") {
		if found, _ := planOf(pv); found != nil {
			p = found
		}
	}
	return p
}

func TestARackWithoutRoomIsReportedAndTheChangeUndone(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.quota = 15 << 30
	_, err := s.c.run(s.options())
	if err == nil || !strings.Contains(err.Error(), "RackFull: no room") ||
		!strings.Contains(err.Error(), "--undo") {
		t.Fatalf("got %v", err)
	}
	if _, err := s.c.run(s.resumes(false)); err == nil {
		t.Error("it went on without room")
	}
	s.c.objects = deleteEvents(s.c.objects)
	s.c.does(s.resumes(true))
	s.c.objects = deleteEvents(s.c.objects)
	s.whole(s.undone)
	s.c.stops = 0
	_, err = s.c.run(s.options())
	s.c.quota = 0
	if err == nil {
		t.Fatal("it found room")
	}
	s.c.does(s.resumes(false))
	s.whole(s.completed)
}

// diesWhileTheDiskIsMade kills a change while a slow provisioner is at work.
func diesWhileTheDiskIsMade(t *testing.T) *story {
	t.Helper()
	for n := 1; ; n++ {
		s := newStory(t, "Deployment", Grow)
		s.retains(1000)
		if !s.c.dies(s.options(), n, true) {
			t.Fatal("it was never seen waiting for the disk")
		}
		if p := s.plan(); p != nil && p.TemporaryUID != "" && p.New == "" {
			return s
		}
	}
}

func TestADiskThatComesAfterTheUndoingIsDeleted(t *testing.T) {
	undo := func(s *story) Options { return s.resumes(true) }
	forget := func(s *story) Options { return s.c.options(s.claim, Forget) }
	for name, end := range map[string]func(*story) Options{"by --undo": undo, "by forget": forget} {
		t.Run(name, func(t *testing.T) {
			s := diesWhileTheDiskIsMade(t)
			for range 2 { // it has not come yet
				says := s.c.does(undo(s))
				if !strings.Contains(says, "may still make a disk") || !strings.Contains(says, "claim forget") {
					t.Fatalf("it does not say that a disk may come:\n%s", says)
				}
			}
			if says, err := s.c.run(s.resumes(false)); err != nil || !strings.Contains(says, "no change") {
				t.Fatalf("got %v, after:\n%s", err, says)
			}
			s.c.refuses(forget(s), "may still make")
			s.c.settled()
			dry := end(s)
			dry.DryRun, s.c.effects = true, 0
			says := s.c.does(dry)
			if !strings.Contains(says, "is deleted with its disk") || s.c.effects != 0 {
				t.Fatalf("%d changes, after:\n%s", s.c.effects, says)
			}
			says = s.c.does(end(s))
			if s.plan() != nil {
				t.Fatalf("the plan is left, after:\n%s", says)
			}
			s.whole(s.undone)
		})
	}
}

func TestAnUndoneChangeIsForgottenWhenItsDiskCannotBeExpected(t *testing.T) {
	s := diesWhileTheDiskIsMade(t)
	s.c.does(s.resumes(true))
	s.c.making = nil // the provisioner has given up
	s.ages()
	s.c.does(s.c.options(s.claim, Forget))
	var f figures
	if s.undone(&f); f.lost+f.orphans+f.late != 0 {
		t.Errorf("%+v", f)
	}
}

func TestTheNextChangeLooksForTheDiskOfAnUndoneOne(t *testing.T) {
	s := diesWhileTheDiskIsMade(t)
	s.c.does(s.resumes(true))
	s.c.slow = 0
	s.c.does(s.options())
	s.c.refuses(s.c.options(s.claim, Forget), "may still make")
	s.c.stops = 0
	s.whole(s.completed)
}

func TestATemporaryClaimThatSomebodyDeletedLeavesNoDisk(t *testing.T) {
	s := diesWhileTheDiskIsMade(t)
	delete(s.c.objects, keyOf(s.temporary()))
	s.c.refuses(s.resumes(false), "--undo")
	s.c.does(s.resumes(true))
	var f figures
	if s.undone(&f); f.lost+f.orphans != 0 || f.late == 0 {
		t.Errorf("%+v", f)
	}
}

func TestARefusedDiskOfAClassThatRetainsIsNotExpected(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.retains(3)
	s.c.quota = 15 << 30
	if _, err := s.c.run(s.options()); err == nil {
		t.Fatal("it found room")
	}
	s.c.does(s.resumes(true))
	s.c.objects = deleteEvents(s.c.objects)
	var f figures
	if s.undone(&f); f.lost+f.orphans+f.late != 0 {
		t.Errorf("%+v", f)
	}
}

func TestAnUndoingStartsTheWorkloadBeforeItCleansUp(t *testing.T) {
	for n := 1; ; n++ {
		s := newStory(t, "Deployment", Grow)
		if !s.c.dies(s.options(), n, true) {
			break
		}
		if p := s.plan(); p == nil || p.Started || s.c.named("VolumeSnapshot", "db", p.Snapshot) == nil {
			continue
		}
		s.c.stuck = true
		o := s.resumes(true)
		o.Timeout = 50 * time.Millisecond
		s.c.refuses(o, "the end of VolumeSnap")
		if s.c.settled(); s.c.named("Deployment", "db", "web").num("spec", "replicas") != 1 {
			t.Fatalf("killed at %d: the workload waits for the end of a snapshot", n)
		}
		s.c.stuck = false
		s.undoes()
	}
}

func TestAClaimThatCouldNotBeMadeAgainIsNotDeleted(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	owner := map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "name": "web",
		"uid": s.c.named("Deployment", "db", "web").uid(), "blockOwnerDeletion": true}
	s.c.touch(s.c.named("PersistentVolumeClaim", "db", s.claim), []any{owner}, "metadata",
		"ownerReferences")
	for want, refuses := range map[string]func(o object) bool{
		"owner": func(o object) bool { return len(o.list("metadata", "ownerReferences")) > 0 },
		"label": func(o object) bool { return o.str("metadata", "labels", "app") != "" },
		"named": func(o object) bool { return o.str("spec", "volumeName") != "" },
	} {
		s.c.admits = func(o object) error {
			if refuses(o) {
				return errors.New("forbidden: " + want)
			}
			return nil
		}
		s.c.effects = 0
		if _, err := s.c.run(s.options()); err == nil || !strings.Contains(err.Error(), want) ||
			s.c.effects != 0 {
			t.Errorf("got %v, and %d changes", err, s.c.effects)
		}
	}
}

func TestAWorkloadThatWasMadeAgainMeanwhileIsNoticed(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.before = func(verb string) {
		if p := s.plan(); p != nil && p.Stopped {
			s.c.before = nil // somebody makes it again, and it has the same generation
			w := s.c.named("Deployment", "db", "web")
			w["metadata"].(map[string]any)["uid"] = "another"
		}
	}
	s.c.refuses(s.options(), "--undo")
	s.c.does(s.resumes(true))
	s.c.settled()
	if text, size := s.c.content(s.claim); !strings.HasPrefix(text+" ", s.held+" ") ||
		size != "10Gi" || s.c.lost != 0 || len(s.c.disks) != s.disks {
		t.Errorf("the claim has %q of %s, and %d of %d disks", text, size, len(s.c.disks), s.disks)
	}
}

func TestABrokenPlanOfAnotherClaimStopsNobody(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.put(pvText, "pv-other", "1Gi", "other", "other", "gone")
	other := s.c.named("PersistentVolume", "", "pv-other")
	s.c.touch(other, "{", "metadata", "annotations", planKey)
	s.c.touch(other, "Retain", "spec", "persistentVolumeReclaimPolicy")
	o := s.options()
	o.DryRun = true
	s.c.does(o)
	s.c.touch(other, s.claim, "spec", "claimRef", "name")
	s.c.refuses(o, "is not a plan")
}

func TestAReadThatFailsOnceStopsNoChange(t *testing.T) {
	s, reads := newStory(t, "Deployment", Grow), 0
	s.c.denied = func(string) bool {
		reads++
		return s.plan() != nil && reads%9 == 0
	}
	s.c.does(s.options())
	s.c.denied = nil
	s.whole(s.completed)
}

func TestANewDiskThatIsGoneIsReported(t *testing.T) {
	for n := 1; ; n++ {
		s := newStory(t, "Deployment", Grow)
		if !s.c.dies(s.options(), n, true) {
			return
		}
		p := s.plan()
		if p.New == "" || p.Finished {
			continue
		}
		delete(s.c.objects, "persistentvolume//"+p.New)
		o := s.resumes(false)
		o.Timeout = 50 * time.Millisecond
		s.c.effects = 0
		want := "repeat the command with --undo"
		if p.Started {
			want = "the earlier disk is in PersistentVolume " + p.Old
		}
		if says, err := s.c.run(o); err == nil || !strings.Contains(err.Error(), p.New+" is gone") ||
			!strings.Contains(err.Error(), want) || s.c.effects > 2 { // it has only taken the change over
			t.Fatalf("killed at %d: got %v and %d changes, after:\n%s", n, err, s.c.effects, says)
		}
		if p.Started {
			continue
		}
		s.c.does(s.resumes(true))
		s.c.settled()
		if text, size := s.c.content(s.claim); !strings.HasPrefix(text+" ", s.held+" ") ||
			size != "10Gi" || s.c.lost != 0 {
			t.Errorf("killed at %d: the claim has %q of %s", n, text, size)
		}
	}
}

func TestASnapshotThatStaysOnTheRackIsSaid(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.touch(s.c.named("VolumeSnapshotClass", "", "oxide-snapshot"), "Retain", "deletionPolicy")
	o := s.options()
	o.DryRun = true
	if says := s.c.does(o); !strings.Contains(says, "oxide-snapshot has the deletionPolicy Retain") {
		t.Errorf("it does not say that the snapshot stays:\n%s", says)
	}
}

const capacityText = `{"kind":"CSIStorageCapacity","metadata":{"name":%q,"namespace":"oxide"},
	"storageClassName":%q,"nodeTopology":{"matchLabels":%s},"capacity":%q,"maximumVolumeSize":%q}`

func TestTheRackIsAskedForNoMoreThanThePublishedCapacity(t *testing.T) {
	type objects = [][]any
	const here, there, max = `{"rack":"a"}`, `{"rack":"b"}`, "1023Gi"
	for name, c := range map[string]struct {
		verb, size string
		published  objects
		want       string // in the plan, or in the refusal
		refused    bool
	}{
		"none is published": {Grow, "", nil, "This is not checked: the cluster publishes no cap", false},
		"enough": {Grow, "", objects{{"c", "oxide-disk", `{}`, "30Gi", max}},
			"30 GiB (32212254720 bytes) is left, by CSIStorageCapacity oxide/c of StorageClass oxide-disk",
			false},
		"too little for both": {Grow, "", objects{{"c", "oxide-disk", `{}`, "29Gi", max}},
			"room for 30 GiB (32212254720 bytes) in the rack's quota (10Gi (snapshot) and 20Gi (new " +
				"disk)), found 29 GiB (31138512896 bytes) left, by CSIStorageCapacity oxide/c of " +
				"StorageClass oxide-disk. Ask for quota, or remove", true},
		"a revert needs the disk only": {Revert, "", objects{{"c", "oxide-disk", `{}`, "10Gi", max}},
			"10 GiB (10737418240 bytes) is left", false},
		"too little for a revert": {Revert, "", objects{{"c", "oxide-disk", `{}`, "9Gi", max}},
			"room for 10 GiB (10737418240 bytes) in the rack's quota (10Gi (new disk)), found 9 GiB", true},
		"nothing is left": {Grow, "", objects{{"c", "oxide-disk", `{}`, "0", max}}, "found 0 bytes left",
			true},
		"a disk has whole GiB": {Grow, "10241Mi", objects{{"c", "oxide-disk", `{}`, "20Gi", max}},
			"room for 21 GiB", true},
		"a large rack": {Grow, "", objects{{"c", "oxide-disk", `{}`, "2Pi", max}}, "2097152 GiB", false},
		"the largest segment counts": {Grow, "", objects{{"a", "oxide-disk", `{}`, "29Gi", max},
			{"b", "oxide-disk", here, "30Gi", max}, {"c", "oxide-disk", here, "0", max}},
			"bytes) is left, by CSIStorageCapacity oxide/b", false},
		"another node's segment does not": {Grow, "", objects{{"a", "oxide-disk", here, "29Gi", max},
			{"b", "oxide-disk", there, "90Gi", max}}, "bytes) left, by CSIStorageCapacity oxide/a", true},
		"another class does not": {Grow, "", objects{{"a", "other", `{}`, "0", max}}, "not checked",
			false},
		"a capacity that is not known does not": {Grow, "", objects{{"a", "oxide-disk", `{}`, "", max}},
			"not checked", false},
		"a disk has a largest size": {Grow, "", objects{{"a", "oxide-disk", `{}`, "90Gi", "19Gi"}},
			"--size: expected a disk of at most 19 GiB (20401094656 bytes), by CSIStorageCapacity oxide/a",
			true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory(t, "Deployment", c.verb)
			s.c.touch(s.c.named("Node", "", "n1"), "a", "metadata", "labels", "rack")
			for _, args := range c.published {
				s.c.put(capacityText, args...)
			}
			o := s.options()
			if o.DryRun = true; c.size != "" {
				o.Size = c.size
			}
			s.c.effects = 0
			says, err := s.c.run(o)
			if err != nil {
				says = err.Error()
			}
			if (err != nil) != c.refused || !strings.Contains(says, c.want) || s.c.effects != 0 ||
				c.refused && !strings.Contains(says, "with a delay") {
				t.Fatalf("got %v after %d changes, want %q in:\n%s", err, s.c.effects, c.want, says)
			}
			if o.DryRun, o.IgnoreCapacity = false, true; c.refused {
				says := s.c.does(o)
				if !strings.Contains(says, "Continued by --ignore-capacity: ") {
					t.Errorf("it does not say that it was told so:\n%s", says)
				}
			}
		})
	}
}

func TestAPersonWhoMayNotReadCapacitiesIsNotRefused(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.denied = func(kind string) bool { return kind == "csistoragecapacity" }
	says := s.c.does(s.options())
	if !strings.Contains(says, "not checked: the published capacities cannot be read") {
		t.Errorf("it does not say that the quota was not checked:\n%s", says)
	}
}

func deleteEvents(all map[string]object) map[string]object {
	for key := range all {
		if strings.HasPrefix(key, "event/") {
			delete(all, key)
		}
	}
	return all
}

func TestARefusalIsReportedAtOnceAndOnlyOnce(t *testing.T) {
	for _, flat := range []bool{false, true} {
		s := newStory(t, "Deployment", Grow)
		s.c.quota, s.c.flat = 15<<30, flat
		for _, o := range []Options{s.options(), s.resumes(false)} {
			if _, err := s.c.run(o); err == nil || !strings.Contains(err.Error(), "RackFull: no room") ||
				strings.Contains(err.Error(), "waited") {
				t.Errorf("flat %t: got %v, want the refusal without a timeout", flat, err)
			}
		}
		s.c.quota, s.c.late = 0, 200
		s.c.does(s.resumes(false)) // the earlier refusals are still there
		s.c.objects = deleteEvents(s.c.objects)
		var f figures
		s.completed(&f)
	}
}

func TestAChangeAsksForEveryRightThatItNeeds(t *testing.T) {
	asked := map[right]bool{}
	s := newStory(t, "Deployment", Grow)
	s.c.lacks = func(r right) bool { asked[r] = true; return false }
	s.c.dies(s.options(), 7, true)
	s.c.does(s.resumes(true))
	s.c.does(s.options())
	s.c.run(s.c.options(s.claim, Forget)) //nolint:errcheck // what it needs counts
	// These two are rehearsed.
	for _, r := range []right{{"create", "persistentvolumeclaims"}, {"scale", "deployments"}} {
		if !s.c.needed[r] {
			t.Errorf("%v is not needed", r)
		}
		delete(s.c.needed, r)
	}
	for r := range s.c.needed {
		if !asked[r] {
			t.Errorf("%v is needed and not asked for", r)
		}
	}
	for r := range asked {
		if r.verb != "list" && !s.c.needed[r] {
			t.Errorf("%v is asked for and not needed", r)
		}
	}
}

func TestAnAPIServerThatDoesNotAnswerAboutRightsStopsNoChange(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	o := s.options()
	kubectl := o.Kubectl
	o.Kubectl = func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
		if strings.Contains(string(stdin), "SelfSubjectAccessReview") {
			return nil, errors.New("exit status 1: Forbidden")
		}
		return kubectl(ctx, stdin, args...)
	}
	says := s.c.does(o)
	if !strings.Contains(says, "your rights are not checked: exit status 1: Forbidden") {
		t.Errorf("it does not say so:\n%s", says)
	}
}

func TestTwoChangesOfOneClaimAreRefused(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	other := s.c.options(s.claim, Revert)
	s.c.before = func(verb string) {
		if verb == "patch" {
			s.c.before = nil // the other command has seen no plan either, and records its own first
			s.c.does(other)
		}
	}
	s.c.refuses(s.options(), "nothing has been changed")
	for o, want := range map[*Options]string{
		ptr(s.options()): "is a revert", ptr(other): "claim forget",
		ptr(s.resumes(true)): "is a revert"} {
		s.c.refuses(*o, want)
	}
}

func ptr[T any](v T) *T { return &v }

func TestAWorkloadThatIsStartedMeanwhileIsNoticed(t *testing.T) {
	for _, at := range []string{"create", "delete"} {
		s := newStory(t, "StatefulSet", Grow)
		done := false
		s.c.before = func(verb string) {
			if verb != at || done || s.c.effects == 0 {
				return
			}
			done = true // somebody starts the workload, which writes, and stops it again
			set := s.c.named("StatefulSet", "db", "web")
			for _, replicas := range []float64{3, 1} {
				s.c.rescale(set, replicas)
				for range 4 {
					s.c.pass()
				}
			}
		}
		s.c.refuses(s.options(), "--undo")
		s.undoes()
	}
}

func TestAPersonStopsWhatTheCommandCannot(t *testing.T) {
	s := newStory(t, "StatefulSet", Grow)
	set := s.c.named("StatefulSet", "db", "web")
	s.c.touch(set, []any{map[string]any{"controller": true, "kind": "Cluster", "name": "pg",
		"apiVersion": "postgresql.cnpg.io/v1"}}, "metadata", "ownerReferences")
	o := s.options()
	o.Timeout = 50 * time.Millisecond
	s.c.refuses(o, "you to stop Cluster pg")
	s.c.rescale(set, 0)
	s.c.before = func(string) {
		if s.c.named("PersistentVolumeClaim", "db", s.claim).annotation(earlierKey) != "" {
			s.c.rescale(set, 3)
			s.c.before = nil
		}
	}
	s.c.does(s.resumes(false))
	var f figures
	if s.completed(&f); f.lost+f.orphans+f.stops != 0 {
		t.Errorf("%+v", f)
	}
}

func TestAPersonWhoStartsTheWorkloadTooEarlyIsNoticed(t *testing.T) {
	s := newStory(t, "StatefulSet", Grow)
	set := s.c.named("StatefulSet", "db", "web")
	s.c.touch(set, []any{map[string]any{"controller": true, "kind": "Cluster", "name": "pg",
		"apiVersion": "postgresql.cnpg.io/v1"}}, "metadata", "ownerReferences")
	s.before = s.c.settled()
	s.c.before = func(verb string) {
		switch {
		case s.c.effects == 1: // the plan has been recorded
			s.c.rescale(set, 0)
		case verb == "delete":
			s.c.rescale(set, 3)
			s.c.before = nil
			s.c.pass()
			s.c.pass()
		}
	}
	s.c.refuses(s.options(), "was started again (pod web-1)")
	s.c.rescale(set, 0)
	s.c.does(s.resumes(true))
	s.c.rescale(set, 3)
	s.whole(s.undone)
}

func TestAnotherRunTakesTheChangeOver(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.before = func(verb string) {
		if verb == "create" && s.c.effects > 0 {
			s.c.before = nil
			if !s.c.dies(s.resumes(true), 3, true) {
				t.Fatal("the other run was not killed")
			}
		}
	}
	s.c.refuses(s.options(), "taken over")
	s.undoes()
}

func TestWhatCannotWorkIsRefusedBeforeAnythingIsChanged(t *testing.T) {
	type change = func(c *cluster, claim object, o *Options)
	set := func(kind, ns, name string, value any, path ...string) change {
		return func(c *cluster, _ object, _ *Options) { c.touch(c.named(kind, ns, name), value, path...) }
	}
	for want, edit := range map[string]change{
		"was not taken of this claim": func(c *cluster, _ object, o *Options) {
			c.put(claimText, "other", "10Gi")
			c.pass()
			c.put(shotText, "foreign", "other")
			o.Verb, o.Size, o.Snapshot = Revert, "", "foreign"
		},
		"that is ready":      func(_ *cluster, _ object, o *Options) { o.Verb = Revert },
		"no disk shrinks":    func(_ *cluster, _ object, o *Options) { o.Size = "10Gi" },
		"at most 1023 GiB":   func(_ *cluster, _ object, o *Options) { o.Size = "2Ti" },
		"a bound Persistent": func(_ *cluster, _ object, o *Options) { o.Claim = "none" },
		"found 0":            func(_ *cluster, _ object, o *Options) { o.SnapshotClass = "none" },
		"a local one":        set("StorageClass", "", "oxide-disk", "local", "parameters", "diskType"),
		"makes no disks":     set("StorageClass", "", "oxide-disk", "other", "provisioner"),
		"start the workload": set("CSINode", "", "n1", nil, "spec", "drivers"),
		"needs: delete persistentvolumeclaims, create volumesnapshots. ": func(
			c *cluster, _ object, _ *Options,
		) {
			c.lacks = func(r right) bool {
				return r == right{"delete", "persistentvolumeclaims"} || r == right{"create", "volumesnapshots"}
			}
		},
		"being scaled down": func(c *cluster, _ object, _ *Options) {
			c.immortal = true
			c.rescale(c.named("StatefulSet", "db", "web"), 1)
		},
		"whenScaled": set("StatefulSet", "db", "web", "Delete", "spec",
			"persistentVolumeClaimRetentionPolicy", "whenScaled"),
		"HorizontalPodAutosc": func(c *cluster, _ object, _ *Options) { c.put(hpaText) },
		"one workload that uses": func(c *cluster, _ object, _ *Options) {
			c.put(`{"kind":"Pod","metadata":{"name":"debug","namespace":"db"},"spec":{"volumes":[{
				"persistentVolumeClaim":{"claimName":"data-web-1"}}]}}`)
		},
		"the finalizer acme.io/hold": func(c *cluster, claim object, _ *Options) {
			c.touch(claim, []any{"kubernetes.io/pvc-protection", "acme.io/hold"}, "metadata", "finalizers")
		},
		"is deleted with it": func(c *cluster, claim object, _ *Options) {
			c.touch(claim, []any{map[string]any{"controller": true, "kind": "Pod", "name": "web-1"}},
				"metadata", "ownerReferences")
		},
	} {
		s := newStory(t, "StatefulSet", Grow)
		o := s.options()
		edit(s.c, s.c.named("PersistentVolumeClaim", "db", s.claim), &o)
		s.c.effects = 0
		if _, err := s.c.run(o); err == nil || !strings.Contains(err.Error(), want) ||
			s.c.effects != 0 {
			t.Errorf("%s: got %v, and %d changes", want, err, s.c.effects)
		}
	}
}

const hpaText = `{"kind":"HorizontalPodAutoscaler","metadata":{"name":"h","namespace":"db"},"spec":{
	"scaleTargetRef":{"kind":"StatefulSet","name":"web"}}}`

func TestADryRunShowsEveryStepAndChangesNothing(t *testing.T) {
	s := newStory(t, "StatefulSet", Grow)
	o := s.options()
	o.DryRun = true
	s.c.effects = 0
	says := s.c.does(o)
	for i, step := range steps {
		if want := fmt.Sprintf("%d/%d %s: ", i+1, len(steps), step.name); !strings.Contains(says, want) {
			t.Errorf("it does not show %q:\n%s", want, says)
		}
	}
	for _, want := range []string{"10Gi (snapshot) and 20Gi", "from 3 to 1", "volumeClaimTemplates",
		"start: POINT OF NO RETURN", "policy Retain (now Delete)"} {
		if !strings.Contains(says, want) {
			t.Errorf("it does not say %q:\n%s", want, says)
		}
	}
	var f figures
	if s.undone(&f); s.c.effects != 0 {
		t.Errorf("%d changes", s.c.effects)
	}
}

func TestAClaimIsRevertedTwice(t *testing.T) {
	s := newStory(t, "Deployment", Revert)
	for range 2 {
		s.c.does(s.options())
		s.completed(&figures{})
		s.held, _ = s.c.content(s.claim)
	}
	for args, want := range map[string]string{"shrink a/b": "expected grow",
		"grow b": "NAMESPACE/NAME",
		"grow":   "expected grow", "grow a/b": "--size", "revert a/b": "--snapshot"} {
		o := Options{Timeout: time.Second}
		if err := o.Parse(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", args, err)
		}
	}
}

// temporary returns the claim for which the new disk is made, or nil.
func (s *story) temporary() object {
	if p := s.plan(); p != nil {
		return s.c.named("PersistentVolumeClaim", "db", p.Temporary)
	}
	return nil
}

func TestADiskThatWasNotMadeForTheChangeIsNeitherTakenNorDeleted(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.before = func(string) {
		if claim := s.temporary(); claim != nil && s.c.disks["stranger"] == "" {
			s.c.disks["stranger"] = "of another tenant"
			s.c.put(pvText, "pv-stranger", "20Gi", "stranger", claim.name(), claim.uid())
			s.c.touch(claim, "pv-stranger", "spec", "volumeName")
		}
	}
	for _, want := range []string{"was not made for it; repeat the command with --undo",
		"give it the reclaim policy Retain"} {
		o := s.options()
		if strings.Contains(want, "Retain") {
			o = s.resumes(true)
		}
		s.c.refuses(o, want)
	}
	s.c.touch(s.c.named("PersistentVolume", "", "pv-stranger"), "Retain", "spec",
		"persistentVolumeReclaimPolicy")
	s.c.does(s.resumes(true))
	if s.c.settled(); s.c.disks["stranger"] == "" {
		t.Error("the disk of somebody else was deleted")
	}
	if text, size := s.c.content(s.claim); !strings.HasPrefix(text+" ", s.held+" ") || size != "10Gi" {
		t.Errorf("the claim has %q of %s", text, size)
	}
}

func TestAClaimThatIsDeletedAfterTheLastStepGetsItsNewDiskAgain(t *testing.T) {
	for n := 1; ; n++ {
		s := newStory(t, "Deployment", Grow)
		if !s.c.dies(s.options(), n, true) {
			t.Fatal("no change comes after the claim was made")
		}
		claim := s.c.named("PersistentVolumeClaim", "db", s.claim)
		if p := s.plan(); !p.Started || claim == nil || claim.uid() == p.ClaimUID {
			continue
		}
		s.c.settled() // it is bound
		delete(s.c.objects, keyOf(claim))
		s.c.pass()
		s.c.refuses(s.resumes(true), "point of no return")
		s.c.does(s.resumes(false))
		s.whole(s.completed)
		return
	}
}

func TestNothingIsForgottenWhileTheClaimIsBeingDeleted(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	s.c.does(s.options())
	s.c.touch(s.c.named("PersistentVolumeClaim", "db", s.claim), "now", "metadata",
		"deletionTimestamp")
	disks := len(s.c.disks)
	if _, err := s.c.run(s.c.options(s.claim, Forget)); err == nil ||
		!strings.Contains(err.Error(), "being deleted") || len(s.c.disks) != disks {
		t.Errorf("got %v, and %d of %d disks", err, len(s.c.disks), disks)
	}
}

func TestAnOwnerThatIsGoneDoesNotTakeTheClaimWithIt(t *testing.T) {
	s := newStory(t, "Deployment", Grow)
	owner := func(name, uid string) any {
		return map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}
	}
	alive := s.c.named("Deployment", "db", "web").uid()
	s.c.touch(s.c.named("PersistentVolumeClaim", "db", s.claim),
		[]any{owner("web", alive), owner("web", "before"), owner("gone", "x")}, "metadata",
		"ownerReferences")
	s.c.does(s.options())
	left := s.c.named("PersistentVolumeClaim", "db", s.claim).list("metadata", "ownerReferences")
	if len(left) != 1 || left[0].str("uid") != alive {
		t.Errorf("the claim has the owners %v", left)
	}
}

func TestANameThatLooksLikeAFlagNeverGetsToKubectl(t *testing.T) {
	c, _ := newCluster(t, "")
	o, err := (&run{Options: c.options("data", Grow)}).get(t.Context(), persistentVolumes, "",
		"--server=https://elsewhere")
	if err == nil || o != nil {
		t.Errorf("got %v, %v", o, err)
	}
}
