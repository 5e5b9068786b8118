package driver

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// handle is a volume's or snapshot's id that an audit is told of.
type handle struct {
	Kind objectKind
	ID   string
	By   string // "PersistentVolume pv-1", "line 3"
}

// could says whether the handle may be that of an object of a kind.
func (h handle) could(kind objectKind) bool { return h.Kind == kind || h.Kind == kindEither }

// told is what an audit is told of.
type told struct {
	Handles []handle
	// At is when all this was so at the latest, and Read when it was read.
	At, Read time.Time

	known map[handle]bool // without By
	// claims are UIDs of claims and snapshot requests. A CO makes names of them, so that an object
	// whose CSI name has one in it is wanted although its volume is not told of (yet).
	claims map[string]bool
}

func newTold(at time.Time) told {
	return told{At: at, Read: time.Now(), known: map[handle]bool{}, claims: map[string]bool{}}
}

func (t *told) add(kind objectKind, id, by string) {
	if canonical, ok := volume.ParseID(id); ok {
		id = string(canonical)
	}
	if key := (handle{Kind: kind, ID: id}); !t.known[key] {
		t.known[key] = true
		t.Handles = append(t.Handles, handle{kind, id, by})
	}
}

func (t *told) claim(uid string) { t.claims[uid] = true }

// also adds what a second reading tells of; ages still count from the first.
func (t *told) also(again told) {
	for _, h := range again.Handles {
		t.add(h.Kind, h.ID, h.By)
	}
	maps.Copy(t.claims, again.claims)
	t.Read = again.Read
}

// inName finds the UIDs in a name such as pvc-6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01.
var inName = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// tells says whether somebody wants an object.
func (t *told) tells(o object) bool {
	return t.known[handle{Kind: o.Kind, ID: o.ID}] || t.known[handle{Kind: kindEither, ID: o.ID}] ||
		slices.ContainsFunc(inName.FindAllString(o.CSIName, -1), func(uid string) bool {
			return t.claims[uid]
		})
}

// orphansOf are the objects of this cluster that nobody tells of, and that were there both before
// and after the told were read: one that was made or deleted meanwhile is none.
func orphansOf(before, now stock, t *told) []object {
	var orphans []object
	for id, o := range now.owned {
		if _, was := before.owned[id]; was && !t.tells(o) {
			orphans = append(orphans, o)
		}
	}
	return sorted(orphans)
}

// trust says for each kind why its orphans cannot be believed in, if so.
type trust map[objectKind]string

// trust judges what an audit is told. The list of another cluster, or of none, makes everything an
// orphan: so it has to tell of something that is this cluster's, and of nothing that is another's.
func (t *told) trust(now stock, noneTold map[objectKind]bool) trust {
	verdict := trust{}
	for _, kind := range []objectKind{kindDisk, kindSnapshot} {
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
					verdict[kind] = fmt.Sprintf("the list tells of %s, which is of the cluster %q: "+
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
		case noneTold[kind] && all > 0:
			verdict[kind] = fmt.Sprintf("--none-told says that there is no %s, and the list tells "+
				"of %d", kind, all)
		case !noneTold[kind] && ours == 0:
			verdict[kind] = fmt.Sprintf("the list tells of no %s that this cluster has on the rack; "+
				"is it the list of another cluster?", kind)
		}
	}
	return verdict
}

// deletePolicy is how sure an audit has to be.
type deletePolicy struct {
	OlderThan time.Duration // the object, when the list was made
	Between   time.Duration // the first sighting and this one
}

// objection says why an orphan stays, or "". first is when an earlier audit saw it as an orphan,
// zero if none did; at is when the present list was made.
func (p deletePolicy) objection(o object, first, at time.Time) string {
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
	case seen < p.Between:
		return fmt.Sprintf("it was seen first %s ago, less than %s", short(seen), short(p.Between))
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
