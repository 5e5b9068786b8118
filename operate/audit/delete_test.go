package audit

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// seenDisk is racktest.DiskOf("detached") as an audit has listed it.
func seenDisk() object {
	return object{Kind: kindDisk, ID: racktest.Disk, Name: volume.DiskName("blue", "pvc-1"),
		CSIName:   "pvc-1",
		SizeBytes: 10 * volume.GiB, State: "detached",
		Created:     time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC),
		description: racktest.OwnTag.Description()}
}

func TestAnOrphanIsReadOnceMoreBeforeItIsDeleted(t *testing.T) {
	gone := racktest.Exchange{Want: racktest.DeleteDisk, Status: 204}
	looks := func(state string, edit ...func(map[string]any)) racktest.Exchange {
		return racktest.OK(racktest.ViewDisk, racktest.DiskOf(state, edit...))
	}
	tagged := func(name, cluster string) func(map[string]any) {
		return racktest.With("description", volume.Tag{Name: name, Cluster: cluster}.Description())
	}
	project := racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	user := racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	hidden := racktest.NotFound.To(racktest.ViewDisk)
	unknown := racktest.NotFound.To(racktest.DeleteDisk)
	type script []racktest.Exchange
	for _, test := range []struct {
		name    string
		lines   script
		skipped string // a word of the skip reason; empty: it is deleted
		code    codes.Code
	}{
		{"and deleted when it is the same", script{looks("detached"), gone}, "", codes.OK},
		{"and stays when it is in use", script{looks(racktest.AttachedHere)}, racktest.Instance,
			codes.OK},
		{"and stays while it is snapshotted", script{looks("maintenance")}, "maintenance", codes.OK},
		{"and stays when it has another tag", script{looks("detached", tagged("pvc-1", "red"))}, `"red"`,
			codes.OK},
		{"and stays when it has another name", script{looks("detached", racktest.With("name", "mine"))},
			"another name", codes.OK},
		{"and stays when it is for another volume now", script{looks("detached",
			racktest.With("name", volume.DiskName("blue", "pvc-2")), tagged("pvc-2", "blue"))},
			"changed since it was listed", codes.OK},
		{"and stays when it was made at another time", script{looks("detached",
			racktest.With("time_created", "2026-06-12T18:01:03Z"))}, "changed since it was listed",
			codes.OK},
		{"and may be gone", script{hidden, project, user, hidden}, "gone", codes.OK},
		{"and may be hidden, which is an error", script{hidden,
			racktest.NotFound.To(racktest.ViewProject)}, "", codes.PermissionDenied},
		{"and may go before the request", script{looks("detached"), unknown, hidden, project, user,
			hidden}, "gone", codes.OK},
		{"and is not gone because a delete does not find it", script{looks("detached"), unknown,
			looks("detached")}, "shows it", codes.OK},
		{"and stays when the rack refuses", script{looks("detached"),
			racktest.Refused.To(racktest.DeleteDisk)}, "the rack refuses", codes.OK},
		{"and another answer than was asked for is an error", script{looks("detached",
			racktest.With("id", racktest.Image))}, "", codes.Unavailable},
		{"and no answer is an error", script{looks("detached"), {Want: racktest.DeleteDisk, Cut: true}},
			"", codes.Unavailable},
	} {
		t.Run(test.name, func(t *testing.T) {
			skipped, err := rackThat(t, test.lines...).deleteOrphan(t.Context(), seenDisk())
			if status.Code(err) != test.code {
				t.Fatalf("got %v, want %v", err, test.code)
			}
			if err == nil && ((skipped == "") != (test.skipped == "") ||
				!strings.Contains(skipped, test.skipped)) {
				t.Errorf("skip reason %q, want %q", skipped, test.skipped)
			}
		})
	}
}

// lists is a source that gives another answer each time.
type lists []func() (wanted, error)

func (l *lists) read(context.Context) (wanted, error) {
	next := (*l)[0]
	*l = (*l)[1:]
	return next()
}

func TestTheListIsReadAgainBeforeADeletion(t *testing.T) {
	list := func(ids ...string) func() (wanted, error) {
		return func() (wanted, error) {
			l := newWanted(auditNow)
			for _, id := range ids {
				l.add(kindDisk, id, "test")
			}
			return l, nil
		}
	}
	claimed := func() (wanted, error) {
		l, err := list(racktest.Numbered(1))()
		l.addClaim(auditUID)
		return l, err
	}
	failing := func() (wanted, error) { return wanted{}, errors.New("kubectl is away") }
	ripe := func() *audit {
		o := seenDisk()
		o.CSIName = "pvc-" + auditUID
		a := &audit{
			options: Options{Delete: true, OlderThan: time.Hour, MinInterval: time.Hour, AtMost: 1},
			log:     &bytes.Buffer{},
			state: state{Objects: map[string]firstSeen{
				racktest.Disk: {FirstSeen: auditNow.Add(48 * time.Hour)},
			}},
			report: report{Orphans: []*orphan{{object: o}}},
		}
		a.wanted, _ = list(racktest.Numbered(1))()
		a.wanted.listedAt = auditNow.Add(72 * time.Hour)
		a.wanted.readAt = time.Now().Add(-time.Minute)
		return a
	}
	gone := []racktest.Exchange{racktest.OK(racktest.ViewDisk, racktest.DiskOf("detached")),
		{Want: racktest.DeleteDisk, Status: 204}}
	for _, test := range []struct {
		name    string
		again   func() (wanted, error)
		lines   []racktest.Exchange
		deleted int
		fails   bool
	}{
		{"and the orphan is still not wanted", list(racktest.Numbered(1)), gone, 1, false},
		{"and the orphan is wanted now", list(racktest.Numbered(1), racktest.Disk), nil, 0, false},
		{"and its claim is there now", claimed, nil, 0, false},
		{"and it is empty, which is no list", list(), nil, 0, true},
		{"and it cannot be read", failing, nil, 0, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := ripe()
			a.source, a.rack = &lists{test.again}, rackThat(t, test.lines...)
			err := a.deleteOrphans(t.Context())
			if (err != nil) != test.fails || a.report.Deleted != test.deleted {
				t.Errorf("got %v, %d deleted: %+v", err, a.report.Deleted, a.report.Orphans[0])
			}
			if a.report.found() != (test.deleted == 0) {
				t.Error("found does not match the remaining orphans")
			}
		})
	}
}

func TestD69MoreOrphansThanAtMostAreAllSkipped(t *testing.T) {
	const many = 3
	for atMost := range many + 1 {
		a := &audit{
			options: Options{Delete: true, OlderThan: time.Hour, MinInterval: time.Hour,
				AtMost: atMost},
			log:    &bytes.Buffer{},
			wanted: newWanted(auditNow.Add(72 * time.Hour)),
			state:  state{Objects: map[string]firstSeen{}},
		}
		a.wanted.readAt = time.Now()
		var lines []racktest.Exchange
		for n := range many {
			o := seenDisk()
			o.ID = racktest.Numbered(n + 1)
			a.report.Orphans = append(a.report.Orphans, &orphan{object: o})
			a.state.Objects[o.ID] = firstSeen{FirstSeen: auditNow}
			lines = append(lines, racktest.OK("GET /v1/disks/"+o.ID, racktest.DiskOf("detached",
				racktest.With("id", o.ID))),
				racktest.Exchange{Want: "DELETE /v1/disks/" + o.ID, Status: 204})
		}
		// An orphan with another skip reason does not count.
		busy := seenDisk()
		busy.ID, busy.AttachedTo = racktest.Numbered(many+1), racktest.Instance
		a.report.Orphans = append(a.report.Orphans, &orphan{object: busy})
		want := many
		if atMost < many {
			want, lines = 0, nil
		}
		a.rack = rackThat(t, lines...)
		if err := a.deleteOrphans(t.Context()); err != nil || a.report.Deleted != want {
			t.Errorf("--at-most %d: %d of %d are deleted, %v", atMost, a.report.Deleted, many, err)
		}
		for _, o := range a.report.Orphans[:many] {
			if strings.Contains(o.SkipReason, "--at-most") != (want == 0) {
				t.Errorf("--at-most %d: skip reason %q", atMost, o.SkipReason)
			}
		}
	}
}

// rackThat serves a script and returns its inventory for an audit of the cluster blue.
func rackThat(t *testing.T, lines ...racktest.Exchange) *ownedRack {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: racktest.Serve(t, lines...),
		Project: racktest.Project, UserAgent: "test"},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	csitest.Must(t, err)
	t.Cleanup(closeIdle)
	return &ownedRack{client, "blue"}
}
