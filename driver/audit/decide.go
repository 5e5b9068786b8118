package audit

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// handle is the id of a volume or snapshot that somebody wants.
type handle struct {
	Kind Kind
	ID   string
	By   string // "PersistentVolume pv-1", "line 3"
}

// could says whether the handle may be that of an object of a kind.
func (h handle) could(kind Kind) bool { return h.Kind == kind || h.Kind == either }

// wanted are the volumes and snapshots that somebody wants.
type wanted struct {
	Handles []handle
	// At is when all this was so at the latest, and Read when it was read.
	listedAt, readAt time.Time

	known map[handle]bool // without By
	// claims are UIDs of claims and snapshot requests. A CO makes names of them, so that an object
	// whose CSI name has one in it is wanted although no list names it (yet).
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

func (t *wanted) claim(uid string) { t.claims[uid] = true }

// also adds what a second reading names; ages still count from the first.
func (t *wanted) also(again wanted) {
	for _, h := range again.Handles {
		t.add(h.Kind, h.ID, h.By)
	}
	maps.Copy(t.claims, again.claims)
	t.readAt = again.readAt
}

// inName finds the UIDs in a name such as pvc-6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01.
var inName = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// wants reports whether somebody wants an object.
func (t *wanted) wants(o object) bool {
	return t.known[handle{Kind: o.Kind, ID: o.ID}] || t.known[handle{Kind: either, ID: o.ID}] ||
		slices.ContainsFunc(inName.FindAllString(o.CSIName, -1), func(uid string) bool {
			return t.claims[uid]
		})
}

// orphansOf are the objects of this cluster that nobody wants, and that existed both before and
// after the list of wanted ones was read: one that was made or deleted meanwhile is none.
func orphansOf(before, now inventory, t *wanted) []object {
	var orphans []object
	for id, o := range now.owned {
		if _, was := before.owned[id]; was && !t.wants(o) {
			orphans = append(orphans, o)
		}
	}
	return sorted(orphans)
}

// trust says for each kind why its orphans cannot be believed in, if so.
type trust map[Kind]string

// trust judges the list of wanted volumes. That of another cluster, or of none, makes everything an
// orphan: so it has to tell of something that is this cluster's, and of nothing that is another's.
func (t *wanted) trust(now inventory, assumeNone map[Kind]bool) trust {
	verdict := trust{}
	for _, kind := range []Kind{Disk, Snapshot} {
		ours, all := 0, 0
		for _, h := range t.Handles {
			own, isOwn := now.owned[h.ID]
			other, isOther := now.others[h.ID]
			switch {
			case isOwn && own.Kind == kind && h.could(kind):
				ours++
				all++
			case isOther && h.could(other.Kind):
				if m, marked := volume.ParseTag(other.description); marked {
					verdict[kind] = fmt.Sprintf("the list names %s, which is of the cluster %q: "+
						"it is the list of another cluster", h.ID, m.Cluster)
				}
				if other.Kind == kind {
					all++
				}
			case !isOwn && h.could(kind):
				all++ // missing, or in another project
			}
		}
		switch {
		case verdict[kind] != "":
		case assumeNone[kind] && all > 0:
			verdict[kind] = fmt.Sprintf("--assume-none says that there is no %s, and the list "+
				"names %d", kind, all)
		case !assumeNone[kind] && ours == 0:
			verdict[kind] = fmt.Sprintf("the list names no %s that this cluster has on the rack; "+
				"is it the list of another cluster?", kind)
		}
	}
	return verdict
}

// deletePolicy is how sure an audit has to be.
type deletePolicy struct {
	OlderThan   time.Duration // the object, when the list was made
	MinInterval time.Duration // between the first audit that saw it and this one
}

// objection says why an orphan stays, or "". first is when an earlier audit saw it as an orphan,
// zero if none did; at is when the present list was made.
func (p deletePolicy) skipReason(o object, first, at time.Time) string {
	age, seen := at.Sub(o.Created), at.Sub(first)
	switch {
	case o.Why != "":
		return "it " + o.Why
	case o.AttachedTo != "":
		return fmt.Sprintf("it is %s to the instance %s", o.State, o.AttachedTo)
	case !o.free():
		return "it is " + o.State
	case o.Created.IsZero():
		return "the rack does not say how old it is"
	case age < p.OlderThan:
		return fmt.Sprintf("it was %s old when the list was made, less than %s", short(age),
			short(p.OlderThan))
	case first.IsZero() || seen <= 0:
		return "it is seen for the first time"
	case seen < p.MinInterval:
		return fmt.Sprintf("it was seen first %s ago, less than %s", short(seen), short(p.MinInterval))
	}
	return ""
}

// short writes a duration for people: 3d4h, 5h10m, 12m.
func short(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "-" + short(-d)
	case d >= day:
		return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	case d >= time.Minute:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}
