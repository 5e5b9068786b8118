package audit

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
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

type script []racktest.Exchange
type edit = func(map[string]any)

// testDisk is a detached disk of the cluster blue, three days old.
func testDisk(n int) object {
	csiName := fmt.Sprintf("pvc-%d", n)
	return object{Kind: kindDisk, ID: racktest.Numbered(n), Name: volume.DiskName("blue", csiName),
		CSIName: csiName, SizeBytes: volume.GiB, State: "detached",
		Created: auditNow.Add(-72 * time.Hour)}
}

// diskPath is the path of testDisk(n).
func diskPath(n int) string { return "/v1/disks/" + racktest.Numbered(n) }

// rackDisk is testDisk(n) as the rack answers.
func rackDisk(n int, edits ...edit) string {
	o := testDisk(n)
	return racktest.DiskOf("detached", append([]edit{racktest.With("id", o.ID),
		racktest.With("name", o.Name), racktest.With("size", o.SizeBytes),
		racktest.With("time_created", o.Created), tagged(o.CSIName, "blue")}, edits...)...)
}

func tagged(name, cluster string) edit {
	return racktest.With("description", volume.Tag{Name: name, Cluster: cluster}.Description())
}

// looks is the request that reads testDisk(n). deletion is that request with the deletion after it.
func looks(n int, edits ...edit) racktest.Exchange {
	return racktest.OK("GET "+diskPath(n), rackDisk(n, edits...))
}

func deletion(n int) script {
	return script{looks(n), {Want: "DELETE " + diskPath(n), Status: 204}}
}

// absent contains the requests that confirm that the rack does not have testDisk(n).
func absent(n int) script {
	view := racktest.NotFound.To("GET " + diskPath(n))
	return script{view, racktest.OK(racktest.ViewProject, racktest.ProjectOf()),
		racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo)), view}
}

func TestAnOrphanIsReadOnceMoreBeforeItIsDeleted(t *testing.T) {
	in := func(state string) edit { return racktest.With("state", racktest.StateOf(state)) }
	remove, name := "DELETE "+diskPath(1), racktest.With("name", testDisk(2).Name)
	givenUp := racktest.With("name", "deleted-"+racktest.Numbered(1))
	instances := racktest.PageOf("", racktest.InstanceOf("running"))
	disksOf := func(disks ...string) script {
		return script{racktest.OK("GET /v1/instances", instances), racktest.OK("GET /v1/instances/"+
			racktest.Instance+"/disks", racktest.PageOf("", disks...))}
	}
	const late, half = "by too old a look", "half deleted, "
	for name, test := range map[string]struct {
		reason string // a word of it; empty: it is deleted
		code   codes.Code
		lines  script
	}{
		"the same":             {"", 0, deletion(1)},
		"in use":               {racktest.Instance, 0, script{looks(1, in(racktest.AttachedHere))}},
		"while it is copied":   {"maintenance", 0, script{looks(1, in("maintenance"))}},
		"faulted":              {"faulted", 0, script{looks(1, in("faulted"))}},
		"with another tag":     {`"red"`, 0, script{looks(1, tagged("pvc-1", "red"))}},
		"with another name":    {"another name", 0, script{looks(1, racktest.With("name", "my"))}},
		"for another volume":   {changed, 0, script{looks(1, name, tagged("pvc-2", "blue"))}},
		"made at another time": {changed, 0, script{looks(1, racktest.With("time_created", auditNow))}},
		"gone":                 {"does not have it", 0, absent(1)},
		"gone before the request": {"does not have it", 0, append(script{looks(1),
			racktest.NotFound.To(remove)}, absent(1)...)},
		"not found for deletion": {"shows it", 0, script{looks(1), racktest.NotFound.To(remove),
			looks(1)}},
		"refused": {"the rack refuses", 0, script{looks(1), racktest.Refused.To(remove)}},
		"no answer": {"may still delete it", codes.Unavailable, script{looks(1),
			{Want: remove, Cut: true}}},
		late: {"looked at the rack", codes.Aborted, script{looks(1)}},
		half + "and free": {"", 0, append(disksOf(), looks(1, givenUp, in("faulted")),
			racktest.Exchange{Want: remove, Status: 204})},
		half + "and at an instance": {racktest.Instance, 0, disksOf(rackDisk(1))},
	} {
		t.Run(name, func(t *testing.T) {
			rack, o := deleting(t, "", test.lines...).rack, testDisk(1)
			if strings.HasPrefix(name, half) {
				o.Name, o.State = "deleted-"+o.ID, "faulted"
			}
			if name == late {
				rack.LookLimit = time.Nanosecond
			}
			reason, err := rack.remove(t.Context(), o)
			if err != nil {
				reason = err.Error()
			}
			if status.Code(err) != test.code || (reason == "") != (test.reason == "") ||
				!strings.Contains(reason, test.reason) {
				t.Errorf("got %q, %v, want %q", reason, err, test.reason)
			}
		})
	}
}

// lists are the requests that list the rack before and after the list of the cluster is read.
func lists(disks []string, snapshots ...string) script {
	once := script{racktest.OK("GET /v1/disks", racktest.PageOf("", disks...)),
		racktest.OK("GET /v1/snapshots", racktest.PageOf("", snapshots...))}
	return slices.Concat(once, once)
}

// kubectlThat puts a kubectl on the PATH that prints a list and exits with a status.
func kubectlThat(t *testing.T, exit int, items ...string) {
	t.Helper()
	dir := t.TempDir()
	csitest.Must(t, os.WriteFile(filepath.Join(dir, "list"), []byte(listOf(items...)), 0o600))
	csitest.Must(t, os.WriteFile(filepath.Join(dir, "kubectl"), fmt.Appendf(nil, "#!/bin/sh\n"+
		"test \"$2\" = customresourcedefinitions && exit\ncat %s/list; exit %d\n", dir, exit), 0o700))
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// blue is the report of the cluster blue in which a person left the objects.
func blue(objects ...object) string {
	return racktest.JSON(map[string]any{"cluster": "blue", "project": racktest.ProjectID,
		"orphans": objects})
}

// deleting returns an audit of the cluster blue that deletes what a report names.
func deleting(t *testing.T, report string, lines ...racktest.Exchange) *audit {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	csitest.Must(t, os.WriteFile(path, []byte(report), 0o600))
	client, closeIdle, err := rack.New(rack.Options{Host: racktest.Serve(t, lines...),
		Project: racktest.Project, UserAgent: "test"},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	csitest.Must(t, err)
	t.Cleanup(closeIdle)
	return &audit{options: Options{Kubectl: true, Delete: path, MinAge: defaultMinAge},
		rack: &ownedRack{client, "blue"}, log: &bytes.Buffer{}}
}

func (a *audit) run(t *testing.T) (report, log string, err error) {
	t.Helper()
	var out, deletions bytes.Buffer
	_, err = Run(t.Context(), a.rack.Client, a.rack.ClusterID, a.options, &out, &deletions)
	return out.String(), deletions.String(), err
}

func TestOnlyWhatAPersonNamesIsDeleted(t *testing.T) { // D-69
	// The rack has disks 1 to 3, a snapshot and another cluster's disk; far is in another project.
	const red, far = 5, 8
	disks := []string{rackDisk(1), rackDisk(2), rackDisk(3), rackDisk(red, tagged("pvc-5", "red"))}
	snapshot := object{Kind: kindSnapshot, ID: racktest.Snapshot, SizeBytes: 10 * volume.GiB,
		Name: volume.SnapshotName("blue", "snap-1"), CSIName: "snap-1",
		Created: time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC)}
	static := func(n int) string {
		return persistent("static", volume.DriverName, racktest.Numbered(n))
	}
	renamed := testDisk(2)
	renamed.Name = testDisk(3).Name
	for _, test := range []struct {
		name  string
		list  []string
		file  string // with what a person names
		then  script
		want  string // in the report or in the error
		fails bool
	}{
		{"an orphan", []string{own(1)}, blue(testDisk(2)), deletion(2), "deleted=1", false},
		{"an orphan, twice", []string{own(1)}, blue(testDisk(2), testDisk(2)), append(deletion(2),
			absent(2)...), "deleted=1", false},
		{"an orphan, beside a disk that was moved here", []string{own(1), static(red)},
			blue(testDisk(2)), deletion(2), "deleted=1", false},
		{"an orphan, beside a disk of another project", []string{own(1), static(far)},
			blue(testDisk(2)), append(script{looks(far, racktest.With("project_id", racktest.Image))},
				deletion(2)...), "is in another project", false},
		{"a snapshot", []string{own(1)}, blue(snapshot), script{racktest.OK("GET /v1/snapshots/"+
			racktest.Snapshot, racktest.SnapshotOf("ready")), {Want: "DELETE /v1/snapshots/" +
			racktest.Snapshot, Status: 204}}, "may be a backup's", false},
		{"a disk that is wanted", []string{own(1)}, blue(testDisk(1)), nil,
			"named by the PersistentVolume pvc-1", false},
		{"a grown volume, which only its claim names", []string{own(1), fmt.Sprintf(places[2], "pvc-2")},
			blue(testDisk(2)), nil, "named by the PersistentVolumeClaim", false},
		{"another object by now", []string{own(1)}, blue(renamed), nil, changed, false},
		{"another cluster's disk", []string{own(1)}, blue(testDisk(red)), nil, `cluster "red"`, false},
		{"by its name only", []string{own(1)}, blue(object{ID: testDisk(2).Name}), nil, "=0", false},
		{"by an empty list", nil, blue(testDisk(2)), nil, "list of another cluster", true},
		{"by the list of the cluster to which disk 1 was moved", []string{static(1)},
			blue(testDisk(2)), nil, "list of another cluster", true},
		{"without a name", []string{own(1)}, blue(), nil, "it has no orphans", true},
		{"by another cluster's report", []string{own(1)}, strings.ReplaceAll(blue(testDisk(2)),
			`"blue"`, `"red"`), nil, `report of the cluster "red"`, true},
		{"by another project's report", []string{own(1)}, strings.ReplaceAll(blue(testDisk(2)),
			racktest.ProjectID, racktest.Disk), nil, racktest.Disk, true},
		{"by half a report", []string{own(1)}, blue(testDisk(2))[:99], nil, "not a report", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			kubectlThat(t, 0, test.list...)
			lines := append(lists(disks, racktest.SnapshotOf("ready")), test.then...)
			out, log, err := deleting(t, test.file, lines...).run(t)
			if (err != nil) != test.fails || !strings.Contains(fmt.Sprint(out, err), test.want) {
				t.Errorf("got %v, want %q in\n%s", err, test.want, out)
			}
			if (log != "") != (len(test.then) > 0) {
				t.Errorf("got the log %q", log)
			}
		})
	}
}

// TestAnEtcdRestoreDeletesNothing creates and deletes random volumes, and restores the cluster's
// list of an earlier moment. A person names all orphans: the disks that were made since the backup.
// At least one volume of the backup was deleted; otherwise audit could not detect the restore.
func TestAnEtcdRestoreDeletesNothing(t *testing.T) {
	for seed := range uint64(12) {
		random := rand.New(rand.NewPCG(seed, 0))
		present := []int{1, 2, 3}
		for last := range 1 + random.IntN(6) {
			gone := 1 + random.IntN(len(present)-1) // the volume 1 stays
			present = append(slices.Delete(present, gone, gone+1), 4+last)
		}
		var items, disks []string
		var missing script
		for n := 1; n <= 3; n++ {
			if items = append(items, own(n)); !slices.Contains(present, n) {
				missing = append(missing, absent(n)...)
			}
		}
		var orphans []object
		for _, n := range present {
			if disks = append(disks, rackDisk(n)); n > 3 {
				orphans = append(orphans, testDisk(n))
			}
		}
		kubectlThat(t, 0, items...)
		_, log, err := deleting(t, blue(orphans...), append(lists(disks), missing...)...).run(t)
		if !strings.Contains(fmt.Sprint(err), "restore of etcd") || log != "" {
			t.Errorf("seed %d: got %v, log %s", seed, err, log)
		}
	}
}

func TestAListThatKubectlCouldNotFinishDeletesNothing(t *testing.T) { // D-69
	var items, disks []string
	for n := range 6 {
		items, disks = append(items, own(n)), append(disks, rackDisk(n))
	}
	for n := range items { // kubectl prints the pages that it has, as a whole list
		kubectlThat(t, 1, items[:n]...)
		if out, _, err := deleting(t, blue(testDisk(n)), lists(disks)[:2]...).run(t); err == nil {
			t.Errorf("%d volumes are a list: %s", n, out)
		}
	}
}

func TestAnOldListIsReadAgainBeforeADeletion(t *testing.T) { // D-69
	disks := lists([]string{rackDisk(1), rackDisk(2)})
	a := deleting(t, blue(testDisk(2)), append(disks, disks...)...)
	kubectlThat(t, 0, own(1))
	c, err := a.compare(t.Context())
	csitest.Must(t, err)
	c.wanted.readAt -= maxListAge + 1
	kubectlThat(t, 0, own(1), own(2))
	a.report = c.report
	csitest.Must(t, a.deleteNamed(t.Context(), c))
	if len(a.report.Orphans) != 1 || len(a.report.Kept) != 1 || a.report.Deleted != 0 {
		t.Errorf("got %+v", a.report)
	}
}

func TestADiskThatIsDeletedWhileTheListIsReadIsNotMissing(t *testing.T) {
	kubectlThat(t, 0, own(1), own(2))
	lines := slices.Concat(lists([]string{rackDisk(1), rackDisk(2)})[:2],
		lists([]string{rackDisk(1)})[:2])
	if c, err := deleting(t, "", lines...).compare(t.Context()); err != nil || c.report.found() {
		t.Errorf("got %+v, %v", c, err)
	}
}
