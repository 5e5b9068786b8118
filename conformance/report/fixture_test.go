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

// exampleNames are the names of some results. The others have generated names.
var exampleNames = map[string]string{
	"A08": "A block size is one of 512, 2048 and 4096",
	"A15": "An object that may not be read does not exist",
	"A21": "A detached disk detaches again without an error",
	"E07": "ControllerUnpublishVolume is idempotent",
	"E08": "ListVolumes pages through more volumes than fit into one answer",
	"D02": "What was written is read on the second instance",
	"D11": "Two volumes of one pod are never confused",
}

func exampleResults() (results []Result) {
	random := rand.New(rand.NewPCG(1, 2))
	call := func(operation, method string, status int, answer string) LoggedCall {
		return LoggedCall{Kind: API, Operation: operation, Method: method, Status: status, Answer: answer,
			Path:         "/v1/disks?project=csi-conformance",
			RequestID:    fmt.Sprintf("%08x-6f0e-4a55-9d61-%012x", random.Uint32(), random.Int64N(1<<48)),
			Milliseconds: math.Round(random.ExpFloat64()*4000) / 10}
	}
	for _, group := range []struct {
		name, letter string
		results      int
	}{{"rules", "A", 24}, {"ext4", "E", 13}, {"block", "B", 13}, {"data", "D", 11}} {
		for i := range group.results {
			id := fmt.Sprintf("%s%02d", group.letter, i+1)
			results = append(results, Result{Group: group.name, ID: id, Status: Passed, Tries: 1,
				Name:    cmp.Or(exampleNames[id], "The rack does in example "+id+" what the driver expects"),
				Source:  "omicron, nexus/src/app/disk.rs (read 2026-08)",
				Seconds: math.Round(random.ExpFloat64()*2200+40) / 1000,
				Evidence: []LoggedCall{call("disk_create", "POST", 201, ""),
					{Kind: RPC, Operation: "DeleteVolume", Code: "OK", Milliseconds: 188.2}},
				Extent: Extent{{What: "disk_create", Looked: 2, Unit: "kinds of answers", Words: "201; 400"}}})
		}
	}
	change := func(i int, status Status, reason string, evidence ...LoggedCall) {
		r := &results[i]
		r.Status, r.Reason, r.Evidence = status, reason, evidence
		if status == Blocked || status == NotTested {
			r.Seconds, r.Tries = 0, 0
		}
	}
	change(7, Failed, "expected 400 for a block size of 1024, found 201: the rack made the disk.",
		call("disk_create", "POST", 201, `{"id":"0d9c4c0e-…","name":"conformance-7c1d0f3a-a08",`+
			`"size":1073741824,"block_size":1024,"state":{"state":"creating"}}`),
		call("disk_delete", "DELETE", 204, ""))
	change(20, Failed, "expected 202 for the second detach, found 400 InvalidRequest.",
		call("instance_disk_detach", "POST", 400,
			`{"message":"cannot detach disk \"conformance-7c1d0f3a-a21\": disk is detached"}`))
	change(51, Failed, "expected to write to the volume on csi-b, found EROFS: the filesystem is "+
		"mounted read-only there. The disk is left for you to look at.",
		LoggedCall{Kind: RPC, Operation: "ControllerPublishVolume", Code: "OK", Milliseconds: 1893},
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
	change(59, NotTested, "The rack has no call that grows a disk.")
	results[26].Tries = 2
	return results
}

func exampleCalls() (all []Calls) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct {
		kind           Kind
		operation      string
		n, failed      int
		median, spread float64
	}{
		{API, "disk_create", 214, 9, 390, 0.35},
		{API, "disk_view", 988, 41, 27, 0.5},
		{API, "instance_disk_attach", 131, 6, 1400, 0.3},
		{API, "snapshot_create", 38, 1, 5200, 0.25},
		{RPC, "CreateVolume", 158, 21, 430, 0.4},
		{RPC, "ControllerPublishVolume", 121, 14, 1650, 0.35},
		{RPC, "NodeStageVolume", 96, 5, 720, 0.7},
		{RPC, "NodePublishVolume", 104, 7, 6, 0.6},
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
	spoiled := copyOf(reflect.ValueOf(*r), func(v reflect.Value) string {
		if _, free := v.Interface().(string); free && v.String() != "" {
			return v.String() + markup
		}
		return v.String()
	}).Interface().(Report)
	return &spoiled
}
