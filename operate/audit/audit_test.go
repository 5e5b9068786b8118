package audit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const auditUID = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b99"

var auditNow = time.Date(2026, 6, 12, 12, 0, 0, 0, time.UTC)

// testDisk is a detached disk of the cluster blue, three days old.
func testDisk(n int, edit ...func(*object)) object {
	o := object{Kind: kindDisk, ID: racktest.Numbered(n), Name: fmt.Sprintf("csi-%016d", n),
		CSIName: fmt.Sprintf("pvc-%d", n), SizeBytes: volume.GiB, State: "detached",
		Created: auditNow.Add(-72 * time.Hour)}
	for _, e := range edit {
		e(&o)
	}
	return o
}

func testInventory(objects ...object) inventory {
	s := inventory{owned: map[string]object{}, others: map[string]object{}}
	for _, o := range objects {
		if o.Foreign != "" {
			s.others[o.ID] = o
			continue
		}
		s.owned[o.ID] = o
	}
	return s
}

func aSnapshot(o *object) { o.Kind, o.State = kindSnapshot, "ready" }

func marked(cluster string) func(*object) {
	return func(o *object) {
		o.Foreign = "is another's"
		o.description = volume.Tag{Name: "x", Cluster: cluster}.Description()
	}
}

func TestOrphans(t *testing.T) {
	names := func(kind Kind, n int) func(*wanted) {
		return func(l *wanted) { l.add(kind, strings.ToUpper(racktest.Numbered(n)), "test") }
	}
	for _, test := range []struct {
		name        string
		before, now inventory
		told        func(*wanted)
		want        []string
	}{
		{"that is not wanted", testInventory(testDisk(1), testDisk(2)),
			testInventory(testDisk(1), testDisk(2)), names(kindDisk, 1), []string{racktest.Numbered(2)}},
		{"not one that a bare handle names", testInventory(testDisk(1)), testInventory(testDisk(1)),
			names(either, 1), nil},
		{"a disk with the id of a wanted snapshot", testInventory(testDisk(1)),
			testInventory(testDisk(1)), names(kindSnapshot, 1), []string{racktest.Numbered(1)}},
		{"not a wanted snapshot", testInventory(testDisk(1, aSnapshot)),
			testInventory(testDisk(1, aSnapshot)), names(kindSnapshot, 1), nil},
		{"not one that was made while the list was read", testInventory(), testInventory(testDisk(1)),
			func(*wanted) {}, nil},
		{"not one that was deleted while the list was read", testInventory(testDisk(1)),
			testInventory(), func(*wanted) {}, nil},
		{"not another cluster's", testInventory(testDisk(1, marked("red"))),
			testInventory(testDisk(1, marked("red"))), func(*wanted) {}, nil},
		{"not one whose claim is there", testInventory(testDisk(1, func(o *object) {
			o.CSIName = "pvc-" + auditUID
		})), testInventory(testDisk(1, func(o *object) { o.CSIName = "pvc-" + auditUID })),
			func(l *wanted) { l.addClaim(auditUID) }, nil},
		{"one whose name only resembles a claim's", testInventory(testDisk(1)),
			testInventory(testDisk(1)), func(l *wanted) { l.addClaim("1"); l.addClaim("") },
			[]string{racktest.Numbered(1)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newWanted(auditNow)
			test.told(&l)
			var got []string
			orphans, _ := orphansOf(test.before, test.now, &l, minAge)
			for _, o := range orphans {
				got = append(got, o.ID)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWhatTheListCannotKnowIsTooYoungToJudge(t *testing.T) { // B-42
	for _, test := range []struct {
		name     string
		created  time.Time
		tooYoung bool
	}{
		{"made after the list", auditNow.Add(time.Second), true},
		{"made shortly before the list", auditNow.Add(time.Second - minAge), true},
		{"old enough when the list was made", auditNow.Add(-minAge), false},
		{"of unknown age", time.Time{}, false},
	} {
		rack := testInventory(testDisk(1, func(o *object) { o.Created = test.created }),
			testDisk(2, aSnapshot, func(o *object) { o.Created = test.created }))
		l := newWanted(auditNow)
		orphans, tooYoung := orphansOf(rack, rack, &l, minAge)
		if want := 2; test.tooYoung && (len(orphans) != 0 || tooYoung != want) ||
			!test.tooYoung && (len(orphans) != want || tooYoung != 0) {
			t.Errorf("%s: %d orphans, %d too young", test.name, len(orphans), tooYoung)
		}
		l.add(kindDisk, racktest.Numbered(1), "test")
		l.add(kindSnapshot, racktest.Numbered(2), "test")
		if _, tooYoung := orphansOf(rack, rack, &l, minAge); tooYoung != 0 {
			t.Errorf("%s: %d of two wanted ones are too young", test.name, tooYoung)
		}
	}
}

func TestTrustInAList(t *testing.T) {
	rack := testInventory(testDisk(1), testDisk(2, aSnapshot), testDisk(3, marked("red")),
		testDisk(4, func(o *object) { o.Foreign = "has no ownership tag of this driver" }))
	none := map[Kind]bool{kindDisk: true, kindSnapshot: true}
	for _, test := range []struct {
		name      string
		told      map[int]Kind
		noneTold  map[Kind]bool
		disks     string // a word of the skip reason
		snapshots string
	}{
		{"one that names both", map[int]Kind{1: kindDisk, 2: kindSnapshot}, nil, "", ""},
		{"an empty one", nil, nil, "another cluster?", "another cluster?"},
		{"an empty one, as the operator knows", nil, none, "", ""},
		{"one that contradicts --assume-none", map[int]Kind{1: kindDisk},
			none, "names 1", ""},
		{"a missing volume against the operator's word", map[int]Kind{9: either}, none,
			"names 1", "names 1"},
		{"one without any snapshot", map[int]Kind{1: kindDisk}, nil, "", "no snapshot"},
		{"one with handles only", map[int]Kind{1: either, 2: either}, nil, "", ""},
		{"one that names nothing that exists", map[int]Kind{8: kindDisk, 9: kindSnapshot},
			nil, "no disk", "no snapshot"},
		{"one that names only static volumes", map[int]Kind{4: kindDisk}, nil, "no disk",
			"no snapshot"},
		{"one that names another cluster's too", map[int]Kind{1: kindDisk,
			2: kindSnapshot, 3: kindDisk}, nil, `cluster "red"`, `cluster "red"`},
		{"one with a snapshot's handle as a volume's", map[int]Kind{2: kindDisk}, nil,
			"no disk", "no snapshot"},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newWanted(auditNow)
			for n, kind := range test.told {
				l.add(kind, racktest.Numbered(n), "test")
			}
			got := l.trust(rack, test.noneTold)
			for kind, word := range map[Kind]string{kindDisk: test.disks,
				kindSnapshot: test.snapshots} {
				if (got[kind] == "") != (word == "") || !strings.Contains(got[kind], word) {
					t.Errorf("%s: got %q, want %q", kind, got[kind], word)
				}
			}
		})
	}
}

func TestSkipReasons(t *testing.T) {
	policy := deletePolicy{OlderThan: 24 * time.Hour, MinInterval: time.Hour}
	long := auditNow.Add(-2 * time.Hour)
	in := func(state, instance string) func(*object) {
		return func(o *object) { o.State, o.AttachedTo = state, instance }
	}
	aged := func(age time.Duration) func(*object) {
		return func(o *object) { o.Created = auditNow.Add(-age) }
	}
	for _, test := range []struct {
		name  string
		o     object
		first time.Time
		want  string // a word of the skip reason; empty: may be deleted
	}{
		{"an old one that was seen before", testDisk(1), long, ""},
		{"exactly as old as it has to be", testDisk(1, aged(24*time.Hour)),
			auditNow.Add(-time.Hour), ""},
		{"an old snapshot", testDisk(1, aSnapshot), long, ""},
		{"a faulted snapshot", testDisk(1, aSnapshot, in("faulted", "")), long, ""},
		{"a snapshot in the making", testDisk(1, aSnapshot, in("creating", "")), long, "creating"},
		{"seen for the first time", testDisk(1), time.Time{}, "not seen by an earlier audit"},
		{"seen in this audit only", testDisk(1), auditNow, "not seen by an earlier audit"},
		{"seen in the future, as after a clock was set back", testDisk(1), auditNow.Add(time.Hour),
			"not seen by an earlier audit"},
		{"seen a moment ago", testDisk(1), auditNow.Add(-59 * time.Minute), "59m ago"},
		{"young", testDisk(1, aged(23*time.Hour)), long, "23h0m old"},
		{"from the future", testDisk(1, aged(-time.Hour)), long, "old when"},
		{"of unknown age", testDisk(1, func(o *object) { o.Created = time.Time{} }), long,
			"age is unknown"},
		{"attached", testDisk(1, in("attached", racktest.Instance)), long, racktest.Instance},
		{"being detached", testDisk(1, in("detaching", racktest.Instance)), long, "detaching"},
		{"being made", testDisk(1, in("creating", "")), long, "creating"},
		{"being snapshotted", testDisk(1, in("maintenance", "")), long, "maintenance"},
		{"faulted", testDisk(1, in("faulted", "")), long, "faulted"},
		{"faulted by a delete that the rack gave up", testDisk(1, in("faulted", ""),
			func(o *object) { o.halfDeleted = true }), long, ""},
		{"with a copied description", testDisk(1, func(o *object) { o.Foreign = "has another name" }),
			long, "another name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := policy.skipReason(test.o, test.first, auditNow)
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestFirstSeenIsOfTheSameOrphan(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	s, err := readState(path, "blue", racktest.ProjectID)
	csitest.Must(t, err)
	sound, later := trust{}, auditNow.Add(time.Hour)
	bad := trust{kindDisk: "another cluster's list"}
	first := s.next([]object{testDisk(1), testDisk(2), testDisk(3, func(o *object) {
		o.State, o.AttachedTo = "attached", racktest.Instance
	})}, auditNow, sound)
	csitest.Must(t, first.write(path))
	read, err := readState(path, "blue", racktest.ProjectID)
	csitest.Must(t, err)
	if diff := cmp.Diff(first, read); diff != "" {
		t.Error(diff)
	}
	when := func(s state, n int) time.Time { return s.Objects[racktest.Numbered(n)].FirstSeen }
	next := read.next([]object{testDisk(1), testDisk(2, func(o *object) {
		o.Created = auditNow
	}), testDisk(3)}, later, sound)
	if !when(next, 1).Equal(auditNow) || !when(next, 2).Equal(later) || !when(next, 3).Equal(later) {
		t.Errorf("got %v", next)
	}
	// An orphan that was in use or wanted meanwhile is dropped.
	if used := read.next([]object{testDisk(1, func(o *object) { o.State = "maintenance" })}, later,
		sound); len(used.Objects) > 0 {
		t.Errorf("got %v", used)
	}
	doubted := read.next([]object{testDisk(1), testDisk(4)}, later, bad)
	if !when(doubted, 1).Equal(auditNow) || len(doubted.Objects) != 1 {
		t.Errorf("a list that is not trusted added something: %v", doubted)
	}
	for name, other := range map[string][2]string{"cluster": {"red", racktest.ProjectID},
		"project": {"blue", racktest.Disk}} {
		if _, err := readState(path, other[0], other[1]); err == nil {
			t.Errorf("another %s read the file", name)
		}
	}
	for _, text := range []string{"", "{", `{"version":2,"cluster":"blue"}`, "[]"} {
		csitest.Must(t, os.WriteFile(path, []byte(text), 0o600))
		if _, err := readState(path, "blue", racktest.ProjectID); err == nil {
			t.Errorf("%q was read", text)
		}
	}
	if left, err := filepath.Glob(path + ".*"); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
