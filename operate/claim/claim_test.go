package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// options returns the options of a run. mode is a verb, or how to resume: "continue" or "undo".
func (c *cluster) options(mode string) Options {
	o := Options{Verb: mode, Namespace: "db", Claim: c.claim, Timeout: time.Minute,
		Kubectl: c.kubectl, Continue: mode == "continue", Undo: mode == "undo"}
	switch p := c.plan(); {
	case mode == Grow:
		o.Size = "20Gi"
	case mode == Revert:
		o.Snapshot = "then"
	case mode != Forget && p != nil:
		o.Verb = p.Verb
	}
	return o
}

func (c *cluster) run(o Options) (printed string, err error) {
	var out strings.Builder
	synctest.Test(c.t, func(t *testing.T) { err = Run(t.Context(), o, &out) })
	return out.String(), err
}

func (c *cluster) plan() (p *plan) {
	for _, pv := range c.of("PersistentVolume") {
		if found, err := planOf(pv); found != nil && err == nil {
			p = found
		}
	}
	return p
}

// at() starts a growth, and kills it before the first request at which when() is true.
func at(t *testing.T, kind string, when func(*plan) bool) *cluster {
	t.Helper()
	s := newCluster(t, kind)
	o := s.options(Grow)
	o.Kubectl = func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
		if p := s.plan(); p != nil && when(p) {
			return nil, errKilled
		}
		return s.kubectl(ctx, stdin, args...)
	}
	if _, err := s.run(o); !errors.Is(err, errKilled) {
		t.Fatalf("the change never got there: %v", err)
	}
	return s
}

func diskChecked(p *plan) bool { return p.New != "" }

func (c *cluster) does(o Options) string {
	c.t.Helper()
	printed, err := c.run(o)
	if err != nil {
		c.t.Fatalf("%v, after:\n%s", err, printed)
	}
	return printed
}

func (c *cluster) refuses(o Options, words string) {
	c.t.Helper()
	if says, err := c.run(o); err == nil || !strings.Contains(err.Error(), words) {
		c.t.Fatalf("got %v, want an error with %q, after:\n%s", err, words, says)
	}
}

func TestAChangeBeyondThePublishedCapacityIsRefused(t *testing.T) {
	type objects = [][]any
	const class, here, there, max = "oxide-disk", `{"rack":"a"}`, `{"rack":"b"}`, "1023Gi"
	left := func(capacity string) objects { return objects{{"c", class, `{}`, capacity, max}} }
	for name, c := range map[string]struct {
		verb, size string
		published  objects
		want       string // a part of the plan, or of the refusal
		refused    bool
	}{
		"none is published": {Grow, "", nil, "This is not checked: the cluster publishes no cap", false},
		"enough": {Grow, "", left("30Gi"), "30 GiB (32212254720 bytes) is left, by CSIStorageCapacity " +
			"oxide/c of StorageClass oxide-disk", false},
		"too little for both": {Grow, "", left("29Gi"), "room for 30 GiB (32212254720 bytes) in the " +
			"rack's quota (10Gi (snapshot) and 20Gi (new disk)), found 29 GiB (31138512896 bytes) left, " +
			"by CSIStorageCapacity oxide/c of StorageClass oxide-disk. Ask for quota, or remove", true},
		"a revert needs the disk only": {Revert, "", left("10Gi"), "10 GiB (10737418240 bytes) is left",
			false},
		"too little for a revert": {Revert, "", left("9Gi"), "room for 10 GiB (10737418240 bytes) in " +
			"the rack's quota (10Gi (new disk)), found 9 GiB", true},
		"nothing is left":      {Grow, "", left("0"), "found 0 bytes left", true},
		"a disk has whole GiB": {Grow, "10241Mi", left("20Gi"), "room for 21 GiB", true},
		"a large rack":         {Grow, "", left("2Pi"), "2097152 GiB", false},
		"the largest segment counts": {Grow, "", objects{{"a", class, `{}`, "29Gi", max},
			{"b", class, here, "30Gi", max}, {"c", class, here, "0", max}},
			"bytes) is left, by CSIStorageCapacity oxide/b", false},
		"another node's segment does not count": {Grow, "", objects{{"a", class, here, "29Gi", max},
			{"b", class, there, "90Gi", max}}, "bytes) left, by CSIStorageCapacity oxide/a", true},
		"another class does not count": {Grow, "", objects{{"a", "other", `{}`, "0", max}},
			"not checked", false},
		"an unknown capacity does not count": {Grow, "", left(""), "not checked", false},
		"a capacity limits each disk": {Grow, "", objects{{"a", class, `{}`, "90Gi", "19Gi"}},
			"--size: expected a disk of at most 19 GiB (20401094656 bytes), by CSIStorageCapacity oxide/a",
			true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newCluster(t, "Deployment")
			s.touch(s.named("Node", "", "n1"), "a", "metadata", "labels", "rack")
			for _, args := range c.published {
				s.put(`{"kind":"CSIStorageCapacity","metadata":{"name":%q,"namespace":"oxide"},
					"storageClassName":%q,"nodeTopology":{"matchLabels":%s},"capacity":%q,
					"maximumVolumeSize":%q}`, args...)
			}
			o := s.options(c.verb)
			o.DryRun, o.Size = true, cmp.Or(c.size, o.Size)
			says, err := s.run(o)
			if err != nil {
				says = err.Error()
			}
			if (err != nil) != c.refused || !strings.Contains(says, c.want) || len(s.needed) > 0 ||
				c.refused && !strings.Contains(says, "with a delay") {
				t.Fatalf("got %v after the changes %v, want %q in:\n%s", err, s.needed, c.want, says)
			}
			o.DryRun, o.IgnoreCapacity = false, true
			if c.refused && !strings.Contains(s.does(o), "Continued by --ignore-capacity: ") {
				t.Error("the flag is not mentioned")
			}
		})
	}
}

func TestTheClaimCommandReportsARefusedDiskInsteadOfWaiting(t *testing.T) {
	for _, flat := range []bool{false, true} {
		s := newCluster(t, "Deployment")
		s.quota, s.flat = 15<<30, flat
		for _, mode := range []string{Grow, "continue"} {
			if _, err := s.run(s.options(mode)); err == nil || strings.Contains(err.Error(), "waited") ||
				!strings.Contains(err.Error(), "RackFull: no room") {
				t.Errorf("flat %t: got %v, want the refusal without a timeout", flat, err)
			}
		}
		s.quota, s.slow = 0, 200
		s.does(s.options("continue")) // the events of earlier refusals still exist
	}
}

func TestAnImpossibleChangeIsRefusedBeforeItBegins(t *testing.T) {
	type change = func(c *cluster, o *Options)
	set := func(kind, ns, name string, value any, path ...string) change {
		return func(c *cluster, _ *Options) { c.touch(c.named(kind, ns, name), value, path...) }
	}
	for want, edit := range map[string]change{
		"was not taken of this claim": func(c *cluster, o *Options) {
			c.put(claimText, "other", "10Gi")
			c.pass()
			c.put(shotText, "foreign", "other")
			o.Verb, o.Size, o.Snapshot = Revert, "", "foreign"
		},
		// The command must not pass a name to kubectl that looks like a flag.
		`"--server=x" is no name`: func(c *cluster, o *Options) {
			o.Verb, o.Size, o.Snapshot = Revert, "", "then"
			c.touch(c.named("VolumeSnapshot", "db", "then"), "--server=x", "status",
				"boundVolumeSnapshotContentName")
		},
		"that is ready":      func(_ *cluster, o *Options) { o.Verb = Revert },
		"no disk shrinks":    func(_ *cluster, o *Options) { o.Size = "10Gi" },
		"at most 1023 GiB":   func(_ *cluster, o *Options) { o.Size = "2Ti" },
		"a bound Persistent": func(_ *cluster, o *Options) { o.Claim = "none" },
		"found 0":            func(_ *cluster, o *Options) { o.SnapshotClass = "none" },
		"a local one":        set("StorageClass", "", "oxide-disk", "local", "parameters", "diskType"),
		"makes no disks":     set("StorageClass", "", "oxide-disk", "other", "provisioner"),
		"start the workload": set("CSINode", "", "n1", nil, "spec", "drivers"),
		"being scaled down": func(c *cluster, _ *Options) {
			c.nodes["n1"].silent = true // the pods do not end
			c.touch(c.named("StatefulSet", "db", "web"), 1.0, "spec", "replicas")
		},
		"whenScaled": set("StatefulSet", "db", "web", "Delete", "spec",
			"persistentVolumeClaimRetentionPolicy", "whenScaled"),
		"HorizontalPodAutosc": func(c *cluster, _ *Options) {
			c.put(`{"kind":"HorizontalPodAutoscaler","metadata":{"name":"h","namespace":"db"},"spec":{
				"scaleTargetRef":{"kind":"StatefulSet","name":"web"}}}`)
		},
		"one workload that uses": func(c *cluster, _ *Options) { c.pod("debug", c.claim, nil, "") },
		"the finalizer acme.io/hold": set("PersistentVolumeClaim", "db", "data-web-1",
			[]any{"kubernetes.io/pvc-protection", "acme.io/hold"}, "metadata", "finalizers"),
		"is made again, would be refused: forbidden": func(c *cluster, _ *Options) {
			owner := map[string]any{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web",
				"uid": c.named("StatefulSet", "db", "web").uid()}
			c.touch(c.current(), []any{owner}, "metadata", "ownerReferences")
			// The webhook refuses a claim only if it has an owner, the label app and a volume.
			c.admits = func(_ *cluster, o object) error {
				if len(o.list("metadata", "ownerReferences")) == 0 || o.str("metadata", "labels",
					"app") == "" || o.str("spec", "volumeName") == "" {
					return nil
				}
				return errors.New("forbidden")
			}
		},
		"is deleted with it": set("PersistentVolumeClaim", "db", "data-web-1", []any{map[string]any{
			"controller": true, "kind": "Pod", "name": "web-1"}}, "metadata", "ownerReferences"),
	} {
		s := newCluster(t, "StatefulSet")
		o := s.options(Grow)
		edit(s, &o)
		_, err := s.run(o)
		if err == nil || !strings.Contains(err.Error(), want) || len(s.needed) > 0 {
			t.Errorf("%s: got %v, and the changes %v", want, err, s.needed)
		}
	}
}

func TestADryRunShowsEveryStepAndChangesNothing(t *testing.T) {
	s := newCluster(t, "StatefulSet")
	s.touch(s.named("VolumeSnapshotClass", "", "oxide-snapshot"), "Retain", "deletionPolicy")
	o := s.options(Grow)
	o.DryRun = true
	says := s.does(o)
	texts := []string{"10Gi (snapshot) and 20Gi", "from 3 to 1", "volumeClaimTemplates",
		"POINT OF NO RETURN", "policy Retain (now Delete)",
		"oxide-snapshot has the deletionPolicy Retain"}
	for i, step := range steps {
		texts = append(texts, fmt.Sprintf("%d/%d %s: ", i+1, len(steps), step.name))
	}
	for _, want := range texts {
		if !strings.Contains(says, want) {
			t.Errorf("it does not say %q:\n%s", want, says)
		}
	}
	if len(s.needed) > 0 {
		t.Errorf("it made the changes %v", s.needed)
	}
}

func TestTheClaimCommandRefusesInvalidArguments(t *testing.T) {
	for args, want := range map[string]string{"shrink a/b": "expected grow", "grow": "expected grow",
		"grow b": "NAMESPACE/NAME", "grow a/b": "--size", "revert a/b": "--snapshot"} {
		o := Options{Timeout: time.Second}
		if err := o.Parse(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", args, err)
		}
	}
}

func TestTheForgetCommandRefusesAClaimThatIsBeingDeleted(t *testing.T) {
	s := newCluster(t, "Deployment")
	s.does(s.options(Grow))
	s.touch(s.current(), "now", "metadata", "deletionTimestamp")
	disks := len(s.disks)
	if s.refuses(s.options(Forget), "being deleted"); len(s.disks) != disks {
		t.Errorf("%d of %d disks are left", len(s.disks), disks)
	}
}

func TestARecreatedClaimOmitsDeletedOwners(t *testing.T) {
	s := newCluster(t, "Deployment")
	owner := func(name, uid string) any {
		return map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}
	}
	alive := s.named("Deployment", "db", "web").uid()
	s.touch(s.current(), []any{owner("web", alive),
		owner("web", "before"), owner("gone", "x")}, "metadata", "ownerReferences")
	s.does(s.options(Grow))
	left := s.current().list("metadata", "ownerReferences")
	if len(left) != 1 || left[0].str("uid") != alive {
		t.Errorf("the claim has the owners %v", left)
	}
}

func TestAnUndoStartsTheWorkloadBeforeItDeletesTheSnapshot(t *testing.T) {
	s := at(t, "Deployment", diskChecked)
	s.stuck = true
	s.refuses(s.options("undo"), "the end of VolumeSnap")
	if s.passes(60); s.named("Deployment", "db", "web").num("spec", "replicas") != 1 {
		t.Fatal("the workload waits for the end of a snapshot")
	}
	s.stuck = false
	s.undoes()
}

// The test changes the new PersistentVolume as a faulty driver, a webhook or a person could.
func TestANewDiskThatDiffersFromTheRequestIsRefused(t *testing.T) {
	c := &cluster{t: t, objects: map[string]object{}}
	set := func(value any, path ...string) func(*view) {
		return func(v *view) { c.touch(v.fresh, value, path...) }
	}
	for want, edit := range map[string]func(*view){
		"":                    func(*view) {},
		"was not made for it": set("pv-stranger", "metadata", "name"),
		`disk is "old", expected "another one than first, old"`: set("old", "spec", "csi",
			"volumeHandle"),
		`disk is ""`:             set("", "spec", "csi", "volumeHandle"),
		"is being deleted":       set("now", "metadata", "deletionTimestamp"),
		`its capacity is "19Gi"`: set("19Gi", "spec", "capacity", "storage"),
		"its claim's dataSource is": func(v *view) {
			c.touch(v.temporary, "x", "spec", "dataSource", "name")
		},
		"snapshotId of its volumeAttributes": set(nil, "spec", "csi", "volumeAttributes",
			volume.CtxSnapshotID),
		`disk is "new", expected "proven"`: func(v *view) { v.plan.NewHandle = "proven" },
	} {
		earlier := object{"metadata": map[string]any{"annotations": map[string]any{earlierKey: "first"}}}
		v := view{plan: &plan{Handle: "old", Size: "20Gi", TemporaryUID: "t", Manifest: earlier,
			Shot: shot{Name: "then", Handle: "shot"}}, temporary: c.put(claimText, "data-grow", "20Gi"),
			fresh: c.put(pvText, "pvc-t", "20Gi", "new", "data", "t")}
		c.touch(v.fresh, "shot", "spec", "csi", "volumeAttributes", volume.CtxSnapshotID)
		c.touch(v.temporary, "then", "spec", "dataSource", "name")
		edit(&v)
		if err := v.prove(); (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestAForgedPlanInAnAnnotationIsRefused(t *testing.T) {
	s := at(t, "Deployment", diskChecked)
	old := s.volume(s.plan().Old)
	text := old.annotation(planKey)
	for name, forged := range map[string]string{
		"a plan of another volume": strings.ReplaceAll(text, old.name(), "other"),
		"a plan of a later volume": strings.Replace(text, `"oldUID":"`, `"oldUID":"x`, 1),
		"no plan":                  "{",
		"the owner is a flag":      strings.Replace(text, `"name":"web"`, `"name":"--server=x"`, 1),
		"a snapshot that is a flag": strings.Replace(text, `"shot":{"name":"`,
			`"shot":{"name":"--x`, 1),
		"a claim of another disk":     strings.Replace(text, s.plan().Handle, "foreign", 1),
		"another claim of the volume": strings.Replace(text, `"claim":"data"`, `"claim":"other"`, 1),
	} {
		s.touch(old, forged, "metadata", "annotations", planKey)
		if p, err := planOf(old); err == nil {
			t.Errorf("%s is accepted: %+v", name, p)
		}
	}
	s.touch(old, text, "metadata", "annotations", planKey)
	if (owner{Kind: "--server=https://elsewhere"}).resource() != "" {
		t.Error("a plan names a resource")
	}
	s.undoes()
}

func (c *cluster) undoes() { c.t.Helper(); c.does(c.options("undo")) }

func TestAChangeIsRefusedWhileAnotherChangeOfTheWorkloadIsUnderWay(t *testing.T) {
	s := at(t, "StatefulSet", func(p *plan) bool { return p.Unmounted })
	s.refuses(s.options(Grow), "is under way already")
	s.refuses(s.options(Revert), "is a grow")
	s.claim = "data-web-0"
	s.refuses(s.options(Grow), "of another change (\"db/data-web-1 ")
}

func TestTheRevertCommandRefusesAReplacedSnapshot(t *testing.T) {
	s := newCluster(t, "Deployment")
	content := func() string {
		return s.disks[handleOf(s.volume(s.current().str("spec", "volumeName")))]
	}
	held := content()
	s.before = func(string) {
		if s.plan() != nil {
			s.before = nil
			s.put(claimText, "foreign", "10Gi")
			s.passes(6)
			s.erase(s.named("VolumeSnapshot", "db", "then"))
			s.pass()
			s.put(shotText, "then", "foreign")
		}
	}
	s.refuses(s.options(Revert), "made again")
	s.undoes()
	if text := content(); !strings.HasPrefix(text+" ", held+" ") {
		t.Errorf("the claim has %q", text)
	}
}

func TestIfTheNewVolumeIsGoneTheErrorSaysHowToGoBack(t *testing.T) {
	for _, handed := range []bool{false, true} {
		s := at(t, "Deployment", func(p *plan) bool { return diskChecked(p) && p.Handed == handed })
		delete(s.objects, "persistentvolume//"+s.plan().New)
		if handed {
			if s.refuses(s.options("undo"), "To go back to it by hand"); s.plan().Undo {
				t.Error("an undo that is refused has changed the plan")
			}
			continue
		}
		s.refuses(s.options("continue"), "--undo")
		s.undoes()
	}
}

func TestAMissingPermissionIsReportedBeforeAChangeBegins(t *testing.T) {
	s := at(t, "Deployment", diskChecked)
	s.does(s.options("undo"))
	s.does(s.options(Grow))
	s.does(s.options(Forget))
	for needs := range s.needed {
		s := newCluster(t, "Deployment")
		s.lacks = func(right string) bool { return right == needs }
		_, err := s.run(s.options(Grow))
		if err == nil || !strings.Contains(err.Error(), "cannot "+needs) || len(s.needed) > 0 {
			t.Errorf("without %q: got %v, and the changes %v", needs, err, s.needed)
		}
	}
	if len(s.needed) != 7 {
		t.Errorf("it needed %v", s.needed)
	}
}

func TestTheOldDiskIsKeptEvenIfItsReclaimPolicyBecomesDelete(t *testing.T) {
	for _, mode := range []string{"continue", "undo"} {
		s := at(t, "Deployment", diskChecked)
		p := s.plan()
		s.touch(s.volume(p.Old), "Delete", "spec", "persistentVolumeReclaimPolicy")
		s.does(s.options(mode))
		s.passes(60)
		if _, there := s.disks[p.Handle]; !there {
			t.Errorf("%s: the earlier disk is gone", mode)
		}
	}
}
