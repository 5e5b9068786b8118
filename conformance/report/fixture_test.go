package report

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"time"
)

// example returns the report of a run in which most results passed, and some failed, were blocked
// or were not tested.
func example() *Report {
	began := time.Date(2026, 8, 28, 14, 3, 7, 0, time.UTC)
	return &Report{
		Schema: SchemaVersion, Verdict: DoesNotConform,
		Why: "3 of 61 results failed: the rack answers two rules of the API in another way than the " +
			"driver expects, and a volume that moved to the second instance came up read-only there.",
		Run: Run{
			ID: "7c1d0f3a", Mark: "conformance-7c1d0f3a", Began: began,
			Ended: began.Add(23*time.Minute + 41*time.Second), Machine: "csi-a",
			Instance: "csi-a", Second: "csi-b", Helper: "csi-helper",
			Command: []string{"oxide-conformance", "run", "--second", "ssh csi-b", "--release", "v20",
				"--groups", "rules,ext4,block,data"},
			Selected: []string{"rules", "ext4", "block", "data"},
			Budget:   "12 disks of 2 GiB at a time, 40 min",
		},
		Rack: RackFacts{Host: "oxide.sys.rack2.example.com", APIVersion: "2026060800.0.0",
			Project: "csi-conformance", HotPlug: HotPlugYes, Release: "v20, in this invented example"},
		Versions: Versions{Suite: "v0.4.0", Driver: "v0.4.0", SDK: "oxide.go v0.10.0",
			Go: "go1.26.8", Kernel: "6.12.41", OS: "Debian 13", Arch: "amd64",
			Tools: map[string]string{"mkfs.ext4": "1.47.2", "mkfs.xfs": "6.13.0"}},
		Preflight: examplePreflight(), Results: exampleResults(), Calls: exampleCalls(),
		Ledger: Ledger{
			Before: map[string]int{"disks": 4, "snapshots": 1, "instances": 3, "attachments": 3,
				"devices": 1, "mounts": 27},
			After: map[string]int{"disks": 5, "snapshots": 1, "instances": 3, "attachments": 3,
				"devices": 1, "mounts": 27},
			Left: []string{"disk csi-5r0c2m8q1v3h7k4t (conformance-7c1d0f3a-move-2)"},
		},
		Witness: Witness{Source: "this program’s own record"},
		CleanUp: "oxide-conformance clean --mark conformance-7c1d0f3a",
	}
}

func examplePreflight() []Line {
	return []Line{
		{Name: "Environment", Status: Pass, Found: "OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT are set"},
		{Name: "Rack", Status: Pass, Found: "answers in 38 ms, with API version 2026060800.0.0"},
		{Name: "This machine", Status: Pass, Found: "is the instance csi-a, runs as root"},
		{Name: "Quota", Status: Warn, Found: "31 GiB are left in the silo; the run may use 24 GiB",
			Advice: "Other users of the silo can make the run fail: raise the quota, or choose fewer " +
				"groups with --groups."},
		{Name: "Second instance", Status: Pass, Found: "`ssh csi-b` reaches csi-b, as root"},
		{Name: "mkfs.btrfs", Status: Skip, Found: "is not installed",
			Advice: "To test btrfs, install btrfs-progs on csi-a and csi-b."},
	}
}

// exampleNames are the names of the results that are not all right. The others have generated
// names.
var exampleNames = map[string]string{
	"A08": "A block size is one of 512, 2048 and 4096",
	"A15": "An object that may not be read does not exist",
	"A16": "An instance has at most 12 disks",
	"A21": "A detached disk detaches again without an error",
	"A24": "A quota counts disks and snapshots with their full size",
	"E07": "ControllerUnpublishVolume is idempotent",
	"E08": "ListVolumes pages through more volumes than fit into one answer",
	"D02": "What was written is read on the second instance",
	"D06": "A raw block volume keeps its bytes across a move",
	"D10": "A volume grows while it is mounted",
	"D11": "Two volumes of one pod are never confused",
}

func exampleResults() (results []Result) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, group := range []struct {
		name, letter string
		results      int
	}{{"rules", "A", 24}, {"ext4", "E", 13}, {"block", "B", 13}, {"data", "D", 11}} {
		for i := range group.results {
			id := fmt.Sprintf("%s%02d", group.letter, i+1)
			results = append(results, Result{Group: group.name, ID: id, Status: Passed, Tries: 1,
				Name:    cmp.Or(exampleNames[id], "The rack does in example "+id+" what the driver expects"),
				Source:  "omicron, nexus/src/app/disk.rs (read 2026-08)",
				Seconds: math.Round(random.ExpFloat64()*2200+40) / 1000, Evidence: exampleEvidence(random),
				Extent: Extent{{What: "disk_create", Looked: 2, Unit: "kinds of answers", Words: "201; 400"}}})
		}
	}
	breakSome(results)
	return results
}

// breakSome changes some results of the example.
func breakSome(results []Result) {
	change := func(i int, status Status, reason string, evidence ...LoggedCall) {
		r := &results[i]
		r.Status, r.Reason, r.Evidence = status, reason, evidence
		if status == Blocked || status == NotTested {
			r.Seconds, r.Tries = 0, 0
		}
	}
	change(7, Failed, "expected 400 for a block size of 1024, found 201: the rack made the disk.",
		LoggedCall{Kind: API, Operation: "disk_create", Method: "POST",
			Path: "/v1/disks?project=csi-conformance", Status: 201, Milliseconds: 412.6,
			RequestID: "f0b3c1de-6f0e-4a55-9d61-6b8a3a1c7e10",
			Answer: `{"id":"0d9c4c0e-…","name":"conformance-7c1d0f3a-a08","size":1073741824,` +
				`"block_size":1024,"state":{"state":"creating"}}`},
		LoggedCall{Kind: API, Operation: "disk_delete", Method: "DELETE",
			Path: "/v1/disks/0d9c4c0e-58a5-4f8e-8a0c-2f6f8f3f5b11", Status: 204, Milliseconds: 188.2,
			RequestID: "5a7c4f7c-0d43-4b0e-8f3e-cf7e6e2f9d02"})
	change(20, Failed, "expected 202 for the second detach, found 400 InvalidRequest.",
		LoggedCall{Kind: API, Operation: "instance_disk_detach", Method: "POST",
			Path: "/v1/instances/csi-helper/disks/detach?project=csi-conformance", Status: 400,
			ErrorCode: "InvalidRequest", Milliseconds: 61.4,
			RequestID: "a3b9f7f2-9b1f-4c56-8c88-2f1f0b0c6a7d",
			Answer:    `{"message":"cannot detach disk \"conformance-7c1d0f3a-a21\": disk is detached"}`})
	change(51, Failed, "expected to write to the volume on csi-b, found EROFS: the filesystem is "+
		"mounted read-only there. The disk is left for you to look at.",
		LoggedCall{Kind: RPC, Operation: "ControllerPublishVolume", Code: "OK", Milliseconds: 1893},
		LoggedCall{Kind: RPC, Operation: "NodeStageVolume", Code: "OK", Milliseconds: 2210},
		LoggedCall{Kind: RPC, Operation: "NodePublishVolume", Code: "Internal",
			ErrorCode: "MOUNT_READ_ONLY", Milliseconds: 12.3,
			Answer: "mount at /var/lib/conformance/b/target: expected a writable mount, found ro: " +
				"the kernel found an error on the device; see dmesg"})
	noRights := "The token may not read other silos' objects, and this rule needs one: run with a " +
		"fleet viewer's token to test it."
	change(14, NotTested, noRights)
	change(23, NotTested, noRights)
	change(15, Blocked, "The project's quota does not have the 12 disks that this rule needs.")
	change(55, Blocked, "The rack refuses to stop csi-helper: another user started it.")
	grow := "The rack has no call that grows a disk."
	change(59, NotTested, grow)
	results[26].Tries = 2
}

func exampleEvidence(random *rand.Rand) []LoggedCall {
	uuid := func() string {
		return fmt.Sprintf("%08x-%04x-4%03x-9%03x-%012x", random.Uint32(), random.IntN(1<<16),
			random.IntN(1<<12), random.IntN(1<<12), random.Int64N(1<<48))
	}
	return []LoggedCall{
		{Kind: API, Operation: "disk_create", Method: "POST",
			Path: "/v1/disks?project=csi-conformance", Status: 201, RequestID: uuid(),
			Milliseconds: math.Round(random.ExpFloat64()*4000) / 10},
		{Kind: RPC, Operation: "DeleteVolume", Code: "OK",
			Milliseconds: math.Round(random.ExpFloat64()*2000) / 10},
	}
}

func exampleCalls() (all []Calls) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct {
		kind      Kind
		operation string
		n, failed int
		median    float64
		spread    float64
	}{
		{API, "disk_create", 214, 9, 390, 0.35},
		{API, "disk_view", 988, 41, 27, 0.5},
		{API, "disk_list", 460, 0, 44, 0.4},
		{API, "disk_delete", 209, 2, 170, 0.4},
		{API, "instance_disk_attach", 131, 6, 1400, 0.3},
		{API, "instance_disk_detach", 127, 1, 900, 0.3},
		{API, "instance_view", 75, 0, 33, 0.4},
		{API, "snapshot_create", 38, 1, 5200, 0.25},
		{API, "snapshot_delete", 37, 0, 640, 0.3},
		{RPC, "CreateVolume", 158, 21, 430, 0.4},
		{RPC, "DeleteVolume", 166, 4, 210, 0.5},
		{RPC, "ControllerPublishVolume", 121, 14, 1650, 0.35},
		{RPC, "ControllerUnpublishVolume", 117, 2, 980, 0.35},
		{RPC, "CreateSnapshot", 29, 3, 5400, 0.3},
		{RPC, "NodeStageVolume", 96, 5, 720, 0.7},
		{RPC, "NodeUnstageVolume", 97, 1, 38, 0.6},
		{RPC, "NodePublishVolume", 104, 7, 6, 0.6},
		{RPC, "NodeUnpublishVolume", 101, 0, 4, 0.6},
		{RPC, "NodeGetVolumeStats", 12, 3, 0.7, 0.5},
	} {
		samples := make([]float64, c.n)
		for i := range samples {
			samples[i] = math.Round(c.median*math.Exp(random.NormFloat64()*c.spread)*100) / 100
		}
		all = append(all, NewCalls(c.kind, c.operation, c.failed, samples))
	}
	return all
}

// minimal returns the smallest report: a run that ended before its first result.
func minimal() *Report {
	return &Report{Schema: SchemaVersion, Verdict: Incomplete, Why: "The rack did not answer.",
		Rack: RackFacts{HotPlug: HotPlugUnknown}}
}

// good returns the report of a run against a simulated rack in which everything passed.
func good() *Report {
	r := example()
	r.Verdict, r.Why = Conforms, "All 61 results passed."
	r.Rack.Simulated, r.Rack.Host = true, "http://127.0.0.1:12220"
	r.Ledger.After, r.Ledger.Left = r.Ledger.Before, nil
	for i := range r.Results {
		r.Results[i].Status, r.Results[i].Reason, r.Results[i].Tries = Passed, "", 1
	}
	return r
}

// hostile returns a report with strings that try to break the page's markup or its width.
func hostile() *Report {
	r := example()
	long := strings.Repeat("oxide-", 60)
	markup := `"'><script>console.log(1)</script><img src=x onerror=alert(1)>` +
		"</style></pre>{{.}}\x00\x1b[31m" + long
	plant(reflect.ValueOf(r).Elem(), func(s reflect.Value) {
		if _, free := s.Interface().(string); free && s.String() != "" {
			s.SetString(s.String() + markup)
		}
	})
	return r
}

// plant calls set for every string of a value that can be set. It replaces the keys of maps.
func plant(v reflect.Value, set func(reflect.Value)) {
	switch v.Kind() {
	case reflect.String:
		set(v)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				plant(v.Field(i), set)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			plant(v.Index(i), set)
		}
	case reflect.Map:
		planted := reflect.MakeMap(v.Type())
		for key, value := range v.Seq2() {
			k, e := reflect.New(key.Type()).Elem(), reflect.New(value.Type()).Elem()
			k.Set(key)
			e.Set(value)
			plant(k, set)
			plant(e, set)
			planted.SetMapIndex(k, e)
		}
		v.Set(planted)
	}
}
