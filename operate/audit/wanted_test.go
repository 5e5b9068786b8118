package audit

import (
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

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var auditNow = time.Date(2026, 6, 12, 12, 0, 0, 0, time.UTC)

// persistent is a PersistentVolume as kubectl prints it.
func persistent(name, driver, handle string) string {
	return racktest.JSON(map[string]any{"apiVersion": "v1", "kind": "PersistentVolume",
		"metadata": map[string]any{"name": name, "uid": "x"},
		"spec":     map[string]any{"csi": map[string]any{"driver": driver, "volumeHandle": handle}}})
}

// own is the PersistentVolume for which the driver made testDisk(n).
func own(n int) string {
	return persistent(testDisk(n).CSIName, volume.DriverName, racktest.Numbered(n))
}

func listOf(items ...string) string {
	return `{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":""},"items":[` +
		strings.Join(items, ",") + `]}`
}

func TestParseWanted(t *testing.T) {
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

func TestAnObjectThatTheListMayLackIsTooYoungToJudge(t *testing.T) { // B-42
	old := auditNow.Add(-defaultMinAge)
	for name, test := range map[string]struct {
		created time.Time
		was     bool // before the list was read
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

// places contains objects that Kubernetes, the driver, its sidecars, the node keeper and claim
// write, with %s in a field that names a disk.
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

func TestAnyFieldThatNamesADiskMakesItWanted(t *testing.T) {
	const claimUID = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b99"
	o, shortened := testDisk(1), testDisk(2)
	o.CSIName = "pvc-" + claimUID
	shortened.CSIName = "pvc-6a3e0f2c7e" // with --volume-name-uuid-length of the provisioner
	random := rand.New(rand.NewPCG(1, 2))
	for _, place := range places {
		for name, o := range map[string]object{o.ID: o, strings.ToUpper(o.ID): o, o.Name: o, o.CSIName: o,
			claimUID: o, shortened.CSIName: shortened} {
			// Other objects have the same fields, with other names.
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

func TestAFileIsAsOldAsItsLastWrite(t *testing.T) {
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
	named.Claim = "shop/cache-grow-big" // by a person, not by a change
	var out strings.Builder
	r := report{}
	for _, o := range []object{disk, raw, moved, snapshot, earlier, later, named} {
		r.Orphans = append(r.Orphans, &listed{object: o})
	}
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
	choose := ` # one of those made for shop/db; choose`
	want := pv(disk, `{namespace: "shop", name: "data"} # that of its time`, fs) +
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
		pv(named, `{namespace: "shop", name: "cache-grow-big"} # that of its time`, fs)
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}
