package audit

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// handle is the id of a wanted volume or snapshot.
type handle struct {
	Kind Kind
	ID   string
	By   string // "PersistentVolume pv-1", "line 3"
}

// mayBe reports whether the handle may name an object of the kind.
func (h handle) mayBe(kind Kind) bool { return h.Kind == kind || h.Kind == either }

// wanted is the list of wanted volumes and snapshots.
type wanted struct {
	Handles []handle
	// listedAt is when the list was made, at the latest, and readAt when it was read.
	listedAt, readAt time.Time

	known map[handle]bool // without By
	// claims are the UIDs of claims and snapshot requests. A CO derives names from them, so an object
	// whose CSI name contains one is wanted even if no list names it yet.
	claims map[string]bool
}

func newWanted(at time.Time) wanted {
	return wanted{listedAt: at, readAt: time.Now(), known: map[handle]bool{},
		claims: map[string]bool{}}
}

func (t *wanted) add(kind Kind, id, by string) {
	if canonical, ok := volume.ParseID(id); ok {
		id = canonical
	}
	if key := (handle{Kind: kind, ID: id}); !t.known[key] {
		t.known[key] = true
		t.Handles = append(t.Handles, handle{kind, id, by})
	}
}

func (t *wanted) addClaim(uid string) { t.claims[uid] = true }

// merge adds the entries of a second reading; ages still count from the first.
func (t *wanted) merge(again wanted) {
	for _, h := range again.Handles {
		t.add(h.Kind, h.ID, h.By)
	}
	maps.Copy(t.claims, again.claims)
	t.readAt = again.readAt
}

// at is the time of which the list tells: a list of the future tells no more than one of now.
func (t *wanted) at() time.Time {
	if t.readAt.Before(t.listedAt) {
		return t.readAt
	}
	return t.listedAt
}

// inName matches the UIDs in a name such as pvc-6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01.
// Every process has this package, and only an audit compiles it.
var inName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
})

// wants reports whether an object is wanted.
func (t *wanted) wants(o object) bool {
	return t.known[handle{Kind: o.Kind, ID: o.ID}] || t.known[handle{Kind: either, ID: o.ID}] ||
		slices.ContainsFunc(inName().FindAllString(o.CSIName, -1), func(uid string) bool {
			return t.claims[uid]
		})
}

// orphansOf returns the objects of this cluster that are not wanted, and that existed both before
// and after the list of wanted objects was read. An object that was made or deleted meanwhile is
// not an orphan. tooYoung counts those that were younger than minAge when the list was made, or
// made after it: the list need not have them.
func orphansOf(before, now inventory, t *wanted, minAge time.Duration) (orphans []object,
	tooYoung int) {
	for id, o := range now.owned {
		_, was := before.owned[id]
		switch {
		case t.wants(o):
		case o.Created.After(t.listedAt.Add(-minAge)):
			tooYoung++
		case was:
			orphans = append(orphans, o)
		}
	}
	return sorted(orphans), tooYoung
}

// trust has, for each kind, the reason not to trust the list of wanted objects, if there is one.
type trust map[Kind]string

// trust checks the list of wanted volumes. With the list of another cluster, or an empty one,
// everything would be an orphan. So the list has to name an object of this cluster, and none of
// another.
func (t *wanted) trust(now inventory, assumeNone map[Kind]bool) trust {
	verdict := trust{}
	for _, kind := range []Kind{kindDisk, kindSnapshot} {
		ours, all := 0, 0
		for _, h := range t.Handles {
			own, isOwn := now.owned[h.ID]
			other, isOther := now.others[h.ID]
			switch {
			case isOwn && own.Kind == kind && h.mayBe(kind):
				ours++
				all++
			case isOther && h.mayBe(other.Kind):
				if m, marked := volume.ParseTag(other.description); marked {
					verdict[kind] = fmt.Sprintf("the list names %s, which belongs to the cluster %q: it is the "+
						"list of another cluster", h.ID, m.Cluster)
				}
				if other.Kind == kind {
					all++
				}
			case !isOwn && h.mayBe(kind):
				all++ // missing, or in another project
			}
		}
		switch {
		case verdict[kind] != "":
		case assumeNone[kind] && all > 0:
			verdict[kind] = fmt.Sprintf("--assume-none asserts that there is no %s, but the list names %d",
				kind, all)
		case !assumeNone[kind] && ours == 0:
			verdict[kind] = fmt.Sprintf("the list names no %s that this cluster has on the rack; "+
				"is it the list of another cluster?", kind)
		}
	}
	return verdict
}

// deletePolicy is how old an orphan has to be, and for how long known, to be deleted.
type deletePolicy struct {
	OlderThan   time.Duration // the object, when the list was made
	MinInterval time.Duration // between the first audit that saw it and this one
}

// skipReason returns why an orphan is not deleted, or "". first is when an audit first saw it as an
// orphan, zero if none did; at is when the current list was made.
func (p deletePolicy) skipReason(o object, first, at time.Time) string {
	age, seen := at.Sub(o.Created), at.Sub(first)
	switch {
	case o.Foreign != "":
		return "it " + o.Foreign
	case o.AttachedTo != "":
		return fmt.Sprintf("it is %s to the instance %s", o.State, o.AttachedTo)
	case !o.free():
		return "it is " + o.State
	case o.Created.IsZero():
		return "its age is unknown"
	case age < p.OlderThan:
		return fmt.Sprintf("it was %s old when the list was made, less than %s", formatAge(age),
			formatAge(p.OlderThan))
	case first.IsZero() || seen <= 0:
		return "it was not seen by an earlier audit"
	case seen < p.MinInterval:
		return fmt.Sprintf("it was first seen %s ago, less than %s", formatAge(seen),
			formatAge(p.MinInterval))
	}
	return ""
}

// formatAge formats a duration: 3d4h, 5h10m, 12m.
func formatAge(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "-" + formatAge(-d)
	case d >= day:
		return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	case d >= time.Minute:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}
