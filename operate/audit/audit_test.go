package audit

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var auditNow = time.Date(2026, 6, 12, 12, 0, 0, 0, time.UTC)

func persistent(name, driver, handle string) string {
	return racktest.JSON(map[string]any{"apiVersion": "v1", "kind": "PersistentVolume",
		"metadata": map[string]any{"name": name, "uid": "x"},
		"spec":     map[string]any{"csi": map[string]any{"driver": driver, "volumeHandle": handle}}})
}

func own(n int) string {
	return persistent(testDisk(n).CSIName, volume.DriverName, racktest.Numbered(n))
}

func listOf(items ...string) string {
	return `{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":""},"items":[` +
		strings.Join(items, ",") + `]}`
}

func TestWantedVolumesAreParsedFromHandlesAndFromJSON(t *testing.T) {
	content := func(spec, status string) string {
		return `{"kind":"VolumeSnapshotContent","metadata":{"name":"c"},"spec":{"driver":"` +
			volume.DriverName + `",` + spec + `},"status":{` + status + `}}`
	}
	const disk, snapshot = racktest.Disk, racktest.Snapshot
	pv := persistent("one", volume.DriverName, disk)
	for text, want := range map[string]string{
		"\n# a comment\n" + strings.ToUpper(disk) + "\r\n  " + snapshot: "[{disk or snapshot " + disk +
			" line 3 } {disk or snapshot " + snapshot + " line 4 }]",
		listOf(): "[]",
		pv:       "[{disk " + disk + " PersistentVolume one one}]",
		listOf(pv, persistent("two", "ebs.csi.aws.com", snapshot)): "[{disk " + disk +
			" PersistentVolume one one}]",
		persistent("one", volume.DriverName, "my-disk"): "[{disk my-disk PersistentVolume one one}]",
		content(`"source":{"volumeHandle":"x"}`, `"snapshotHandle":"s"`): "[{snapshot s " +
			"VolumeSnapshotContent c }]",
		content(`"source":{"snapshotHandle":"s"}`, ""): "[{snapshot s " +
			"VolumeSnapshotContent c }]",
		content(`"source":{"volumeHandle":"x"}`, ""):             "[]",
		"NAME   CAPACITY\npv-1   1Gi\n":                          "line 1",
		`{"kind":"Status","status":"Failure"}`:                   "an error of Kubernetes",
		persistent("one", volume.DriverName, ""):                 "without a volumeHandle",
		`{"kind":"List","metadata":{"continue":"x"},"items":[]}`: "one page of a longer list",
	} {
		got, err := parseWanted("", []byte(text), auditNow)
		if err == nil && fmt.Sprint(got.handles) != want ||
			err != nil && (got != nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %+v, %v, want %s", text, got, err, want)
		}
	}
}

func TestAYoungObjectIsNoOrphan(t *testing.T) { // B-42
	old := auditNow.Add(-defaultMinAge)
	for name, test := range map[string]struct {
		created time.Time
		was     bool // the object existed before the list was read
		want    string
	}{"old enough": {old, true, isOrphan}, "just too young": {old.Add(1), true, isYoung},
		"made meanwhile": {old, false, isYoung}, "of unknown age": {time.Time{}, true, isYoung}} {
		o := testDisk(1)
		o.Created = test.created
		c := comparison{wanted: &wanted{listedAt: auditNow}, minAge: defaultMinAge}
		if test.was {
			c.before = inventory{o.ID: o}
		}
		if got := c.judge(o); got != test.want {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

// places contains objects that Kubernetes, the driver, its sidecars, the node keeper and the
// command "claim" write. In each, %s is in a field that may name a disk.
var places = []string{
	`{"kind":"PersistentVolume","spec":{"csi":{"driver":"csi.oxide.computer","volumeHandle":"%s"}}}`,
	`{"kind":"PersistentVolume","metadata":{"annotations":{"csi.oxide.computer/claim-plan":` +
		`"{\"old\":\"pv\",\"new\":{\"handle\":\"%s\"}}"}}}`,
	`{"kind":"PersistentVolumeClaim","spec":{"volumeName":"%s"}}`,
	`{"kind":"PersistentVolumeClaim","metadata":{"namespace":"shop","annotations":` +
		`{"csi.oxide.computer/claim-earlier-volumes":"0d9d1d7a-3c5e-4a37-8d51-5d3f0a1b2c03,%s"}}}`,
	`{"kind":"PersistentVolumeClaim","metadata":{"uid":"%s"}}`,
	`{"kind":"VolumeAttachment","spec":{"source":{"persistentVolumeName":"%s"}}}`,
	`{"kind":"VolumeSnapshotContent","spec":{"source":{"volumeHandle":"%s"}}}`,
	`{"kind":"VolumeSnapshotContent","spec":{"source":{"snapshotHandle":"%s"}}}`,
	`{"kind":"VolumeSnapshotContent","status":{"snapshotHandle":"%s"}}`,
	`{"kind":"CSIDriver","metadata":{"annotations":{"csi.oxide.computer/moving-%s":"{}"}}}`,
	`{"kind":"Node","metadata":{"annotations":{"csi.oxide.computer/cold-attach":` +
		`"{\"waiting\":[\"%s\"]}"}}}`,
	`{"kind":"Node","status":{"volumesInUse":["kubernetes.io/csi/csi.oxide.computer^%s"]}}`,
	`{"kind":"VolumeSnapshot","metadata":{"labels":{"x":"a-%s-b"}}}`,
}

func TestADiskNamedInAnyKubernetesObjectIsNoOrphan(t *testing.T) {
	const claimUID = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b99"
	o, shortened := testDisk(1), testDisk(2)
	o.CSIName = "pvc-" + claimUID
	shortened.CSIName = "pvc-6a3e0f2c7e" // as with the provisioner's --volume-name-uuid-length
	random := rand.New(rand.NewPCG(1, 2))
	for _, place := range places {
		for name, o := range map[string]object{o.ID: o, strings.ToUpper(o.ID): o, o.Name: o, o.CSIName: o,
			claimUID: o, shortened.CSIName: shortened} {
			// None of these items names the disk.
			items := []string{persistent("other", volume.DriverName, racktest.Numbered(8))}
			for range random.IntN(3) {
				items = append(items, fmt.Sprintf(places[random.IntN(len(places))], racktest.Numbered(9)))
			}
			with := slices.Insert(slices.Clone(items), random.IntN(len(items)), fmt.Sprintf(place, name))
			for text, want := range map[string]bool{listOf(items...): false, listOf(with...): true} {
				list, err := parseWanted("", []byte(text), auditNow)
				csitest.Must(t, err)
				if by, got := list.names(o); got != want || got && !strings.Contains(place, `"`+
					strings.Split(by, " ")[0]+`"`) {
					t.Errorf("%q names %+v: %v, by %q", text, o, got, by)
				}
			}
		}
	}
}

func TestAListFileIsDatedByItsModificationTime(t *testing.T) {
	file := Options{Volumes: filepath.Join(t.TempDir(), "wanted")}
	if _, err := file.read(t.Context()); err == nil {
		t.Error("a missing file is not an empty list")
	}
	csitest.Must(t, os.WriteFile(file.Volumes, []byte(racktest.Disk), 0o600))
	now := time.Now()
	old, future := now.Add(-time.Hour), now.Add(time.Hour)
	for written, want := range map[time.Time]time.Time{old: old, future: now} {
		csitest.Must(t, os.Chtimes(file.Volumes, written, written))
		if got, err := file.read(t.Context()); err != nil || got.listedAt.Sub(want).Abs() > time.Minute {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
	}
}

func TestOrphansAreWrittenAsManifests(t *testing.T) {
	disk, raw, moved, snapshot := testDisk(1), testDisk(2), testDisk(3), testDisk(4)
	disk.Claim, raw.Use, moved.Foreign = "shop/data-grow-0a1b2c3d", volume.UseBlock, "has another name"
	snapshot.Kind, snapshot.CSIName = kindSnapshot, "Snap_1"
	earlier, later := testDisk(5), testDisk(6)
	earlier.Claim, later.Claim, later.AttachedTo = "shop/db", "shop/db-revert-00000001", "node-1"
	named := testDisk(7)
	named.Claim = "shop/cache-grow-big" // a person chose this name, not a change
	var out strings.Builder
	r := report{Orphans: []*object{&disk, &raw, &moved, &snapshot, &earlier, &later, &named}}
	csitest.Must(t, r.write("pv", &out, io.Discard))
	pv := func(o object, claim, rest string) string {
		return fmt.Sprintf(`---
apiVersion: v1
kind: PersistentVolume
metadata: {name: %q} # %s
spec:
  capacity: {storage: "1073741824"}
  accessModes: [ReadWriteOnce] # as the claim's, or ReadWriteOncePod
  persistentVolumeReclaimPolicy: Retain # Delete, when all is well and its claim shall delete it
  storageClassName: oxide-disk # as the claim's
  claimRef: %s
%s`, o.CSIName, strings.TrimSpace("made 2026-06-09 12:00:00, detached "+o.AttachedTo), claim,
			strings.ReplaceAll(rest, "ID", o.ID))
	}
	const csi = "  csi:\n    driver: csi.oxide.computer\n    volumeHandle: ID\n"
	const fs = csi + "    fsType: ext4 # what the disk holds; if another, the pod's events name it\n"
	choose := ` # one of several made for shop/db; choose`
	want := pv(disk, `{namespace: "shop", name: "data"} # for which it was made`, fs) +
		pv(raw, `{namespace: "default", name: "pvc-2"} # unknown`, "  volumeMode: Block\n"+csi) +
		fmt.Sprintf(`---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: "oxide-%[1]s"} # made 2026-06-09 12:00:00, detached
spec:
  deletionPolicy: Retain
  driver: csi.oxide.computer
  source: {snapshotHandle: %[1]s}
  volumeSnapshotRef: {namespace: "default", name: "oxide-%[1]s"}
`, snapshot.ID) + pv(earlier, `{namespace: "default", name: "pvc-5"}`+choose, fs) +
		pv(later, `{namespace: "default", name: "pvc-6"}`+choose, fs) +
		pv(named, `{namespace: "shop", name: "cache-grow-big"} # for which it was made`, fs)
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

type script []racktest.Exchange
type edit = func(map[string]any)

func testDisk(n int) object {
	csiName := fmt.Sprintf("pvc-%d", n)
	return object{Kind: kindDisk, ID: racktest.Numbered(n), Name: volume.DiskName("blue", csiName),
		CSIName: csiName, SizeBytes: volume.GiB, State: "detached",
		Created: auditNow.Add(-72 * time.Hour)}
}

func diskPath(n int) string { return "/v1/disks/" + racktest.Numbered(n) }

func rackDisk(n int, edits ...edit) string {
	o := testDisk(n)
	return racktest.DiskOf("detached", append([]edit{racktest.With("id", o.ID),
		racktest.With("name", o.Name), racktest.With("size", o.SizeBytes),
		racktest.With("time_created", o.Created), tagged(o.CSIName, "blue")}, edits...)...)
}

func tagged(name, cluster string) edit {
	return racktest.With("description", volume.Tag{Name: name, Cluster: cluster}.Description())
}

func looks(n int, edits ...edit) racktest.Exchange {
	return racktest.OK("GET "+diskPath(n), rackDisk(n, edits...))
}

func deletion(n int) script {
	return script{looks(n), {Want: "DELETE " + diskPath(n), Status: 204}}
}

// absent() returns the requests by which the audit finds that the rack does not have testDisk(n).
func absent(n int) script {
	view := racktest.NotFound.To("GET " + diskPath(n))
	return script{view, racktest.OK(racktest.ViewProject, racktest.ProjectOf()),
		racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo)), view}
}

func TestAnOrphanIsReadAgainBeforeItIsDeleted(t *testing.T) {
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
		reason string // a part of the reason; empty if the orphan is deleted
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
			a, o := deleting(t, "", test.lines...), testDisk(1)
			if strings.HasPrefix(name, half) {
				o.Name, o.State = "deleted-"+o.ID, "faulted"
			}
			if name == late {
				a.LookLimit = time.Nanosecond
			}
			reason, err := a.remove(t.Context(), o)
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

// lists() returns the requests that list disks and snapshots, before and after kubectl runs.
func lists(disks []string, snapshots ...string) script {
	once := script{racktest.OK("GET /v1/disks", racktest.PageOf("", disks...)),
		racktest.OK("GET /v1/snapshots", racktest.PageOf("", snapshots...))}
	return slices.Concat(once, once)
}

func kubectlThat(t *testing.T, exit int, items ...string) {
	t.Helper()
	dir := t.TempDir()
	csitest.Must(t, os.WriteFile(filepath.Join(dir, "list"), []byte(listOf(items...)), 0o600))
	csitest.Must(t, os.WriteFile(filepath.Join(dir, "kubectl"), fmt.Appendf(nil, "#!/bin/sh\n"+
		"test \"$2\" = customresourcedefinitions && exit\ncat %s/list; exit %d\n", dir, exit), 0o700))
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// blue() returns a report of the cluster "blue" that a person has shortened to the given objects.
func blue(objects ...object) string {
	return racktest.JSON(map[string]any{"cluster": "blue", "project": racktest.ProjectID,
		"orphans": objects})
}

func deleting(t *testing.T, report string, lines ...racktest.Exchange) *audit {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	csitest.Must(t, os.WriteFile(path, []byte(report), 0o600))
	client, closeIdle, err := rack.New(rack.Options{Host: racktest.Serve(t, lines...),
		Project: racktest.Project, UserAgent: "test"},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	csitest.Must(t, err)
	t.Cleanup(closeIdle)
	return &audit{Client: client, clusterID: "blue", log: &bytes.Buffer{},
		options: Options{Kubectl: true, Delete: path, MinAge: defaultMinAge}}
}

func (a *audit) run(t *testing.T) (report, log string, err error) {
	t.Helper()
	var out, deletions bytes.Buffer
	_, err = Run(t.Context(), a.Client, a.clusterID, a.options, &out, &deletions)
	return out.String(), deletions.String(), err
}

func TestOnlyNamedOrphansAreDeleted(t *testing.T) { // D-69
	// The rack has disks 1 to 3, a snapshot, another cluster's disk 5, and another project's disk 8.
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
		file  string // the content of the file for --delete
		then  script
		want  string // a part of the report or of the error
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
		{"a disk that changed since the report", []string{own(1)}, blue(renamed), nil, changed, false},
		{"another cluster's disk", []string{own(1)}, blue(testDisk(red)), nil, `cluster "red"`, false},
		{"a disk by its name", []string{own(1)}, blue(object{ID: testDisk(2).Name}), nil, "=0", false},
		{"by an empty list", nil, blue(testDisk(2)), nil, "list of another cluster", true},
		{"by the list of the cluster to which disk 1 was moved", []string{static(1)},
			blue(testDisk(2)), nil, "list of another cluster", true},
		{"by a report without orphans", []string{own(1)}, blue(), nil, "it has no orphans", true},
		{"by another cluster's report", []string{own(1)}, strings.ReplaceAll(blue(testDisk(2)),
			`"blue"`, `"red"`), nil, `report of the cluster "red"`, true},
		{"by another project's report", []string{own(1)}, strings.ReplaceAll(blue(testDisk(2)),
			racktest.ProjectID, racktest.Disk), nil, racktest.Disk, true},
		{"by a truncated report", []string{own(1)}, blue(testDisk(2))[:99], nil, "not a report", true},
		{"by a list from before a restore of etcd", []string{own(1), own(4)},
			blue(testDisk(2), testDisk(3)), absent(4), "restore of etcd", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			kubectlThat(t, 0, test.list...)
			lines := append(lists(disks, racktest.SnapshotOf("ready")), test.then...)
			out, log, err := deleting(t, test.file, lines...).run(t)
			if (err != nil) != test.fails || !strings.Contains(fmt.Sprint(out, err), test.want) {
				t.Errorf("got %v, want %q in\n%s", err, test.want, out)
			}
			if (log != "") != (len(test.then) > 0 && !test.fails) {
				t.Errorf("got the log %q", log)
			}
		})
	}
}

func TestNothingIsDeletedIfKubectlFails(t *testing.T) { // D-69
	var items, disks []string
	for n := range 6 {
		items, disks = append(items, own(n)), append(disks, rackDisk(n))
	}
	for n := range items { // kubectl fails after it has printed n objects as a list
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
	csitest.Must(t, a.deleteNamed(t.Context(), c))
	if r := c.report; len(r.Orphans) != 1 || len(r.Kept) != 1 || r.Deleted != 0 {
		t.Errorf("got %+v", r)
	}
}

func TestADiskDeletedDuringTheAuditIsNotReportedAsMissing(t *testing.T) {
	kubectlThat(t, 0, own(1), own(2))
	lines := slices.Concat(lists([]string{rackDisk(1), rackDisk(2)})[:2],
		lists([]string{rackDisk(1)})[:2])
	if c, err := deleting(t, "", lines...).compare(t.Context()); err != nil || c.report.found() {
		t.Errorf("got %+v, %v", c, err)
	}
}
