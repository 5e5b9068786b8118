package report

import "time"

// SchemaVersion is the version of report.json that this package writes and reads. It changes when a
// property does.
const SchemaVersion = 1

// Report is what one run found. A slice or map may be nil, which report.json shows as empty.
type Report struct {
	// Schema is the version of the format, SchemaVersion.
	Schema  int     `json:"schema"`
	Verdict Verdict `json:"verdict"`
	// Why is one sentence: the reason for the verdict.
	Why      string   `json:"why"`
	Run      Run      `json:"run"`
	Rack     Rack     `json:"rack"`
	Versions Versions `json:"versions"`
	// Preflight is what was checked before the run, in the order of the checks.
	Preflight []Line   `json:"preflight"`
	Results   []Result `json:"results"`
	// Calls are the latencies, one entry for each operation of the API and each RPC.
	Calls   []Calls `json:"calls"`
	Ledger  Ledger  `json:"ledger"`
	Witness Witness `json:"witness"`
	// CleanUp is the command that deletes what this run has left on the rack and on the machine.
	CleanUp string `json:"clean_up"`
}

// Verdict is the result of a run. A failed result outweighs everything else.
type Verdict string

// The verdicts, from the best to the worst.
const (
	// Conforms: everything that was tested passed.
	Conforms Verdict = "conforms"
	// BlockedByRack: nothing failed, but the rack lacks a feature that part of the run needs.
	BlockedByRack Verdict = "blocked"
	// Incomplete: nothing failed, but the run could not be carried to its end.
	Incomplete Verdict = "incomplete"
	// InterruptedRun: nothing failed, but somebody stopped the run.
	InterruptedRun Verdict = "interrupted"
	// DoesNotConform: at least one result failed, or the run left something or was contradicted.
	DoesNotConform Verdict = "does not conform"
)

// Run says which run it was and how it was started.
type Run struct {
	ID string `json:"id"`
	// Mark begins the names of everything that the run makes.
	Mark  string    `json:"mark"`
	Began time.Time `json:"began"`
	Ended time.Time `json:"ended"`
	// Machine is the host name of the machine that the program ran on.
	Machine string `json:"machine"`
	// Instance is the name of the rack's instance that the machine is, Second that of another one
	// which volumes moved to, Helper that of one which was started and stopped. Empty if there was
	// none.
	Instance string `json:"instance"`
	Second   string `json:"second"`
	Helper   string `json:"helper"`
	// Command is the program with its arguments.
	Command []string `json:"command"`
	// Selected are the groups that were to run.
	Selected []string `json:"selected"`
	// Budget is what the run might use, in words: "12 disks of 2 GiB, 40 min".
	Budget string `json:"budget"`
}

// Rack describes the rack that the run was made against.
type Rack struct {
	Host       string `json:"host"`
	APIVersion string `json:"api_version"`
	Project    string `json:"project"`
	// HotPlug says whether the rack attaches disks to running instances.
	HotPlug HotPlug `json:"hot_plug"`
	// Release is the rack's release in the operator's words; the API does not tell it.
	Release string `json:"release"`
	// Simulated is true for a simulated rack, whose results say nothing of a real one.
	Simulated bool `json:"simulated"`
}

// HotPlug answers whether a rack attaches disks to running instances.
type HotPlug string

// The answers.
const (
	HotPlugYes     HotPlug = "yes"
	HotPlugNo      HotPlug = "no"
	HotPlugUnknown HotPlug = "unknown"
)

// Versions of all that took part.
type Versions struct {
	Suite  string `json:"suite"`
	Driver string `json:"driver"`
	SDK    string `json:"sdk"`
	Go     string `json:"go"`
	Kernel string `json:"kernel"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	// Tools are the programs that the driver runs, such as mkfs.ext4, and their versions.
	Tools map[string]string `json:"tools"`
}

// Line is one check of the preflight.
type Line struct {
	Name   string     `json:"name"`
	Status LineStatus `json:"status"`
	// Found is what the check found, Advice what to do about it if anything.
	Found  string `json:"found"`
	Advice string `json:"advice"`
}

// LineStatus is the result of a check of the preflight.
type LineStatus string

// The results of a check.
const (
	Pass LineStatus = "pass"
	Warn LineStatus = "warn"
	Fail LineStatus = "fail"
	Skip LineStatus = "skip"
)

// Result is that of one rule or spec.
type Result struct {
	// Group is what it belongs to: "rules", "ext4", "xfs", "btrfs", "block" or "data".
	Group string `json:"group"`
	// ID is short and unique in its group, such as "A12"; a spec without one has its name only.
	ID     string `json:"id"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Seconds is how long it took, in seconds.
	Seconds float64 `json:"seconds"`
	// Reason is why it failed, or why it was blocked, not tested or interrupted. Empty if it passed.
	Reason string `json:"reason"`
	// Tries is how often it was run; 0 if it was not.
	Tries int `json:"tries"`
	// Source cites where a rule comes from.
	Source string `json:"source"`
	// Evidence is what was asked and answered, in order.
	Evidence []Exchange `json:"evidence"`
}

// Status of a result.
type Status string

// The statuses of results.
const (
	Passed Status = "passed"
	Failed Status = "failed"
	// Blocked: the rack lacks what the spec needs.
	Blocked Status = "blocked"
	// NotTested: this run did not try, for another reason.
	NotTested Status = "not_tested"
	// NotApplicable: it is about what the driver does not offer.
	NotApplicable Status = "not_applicable"
	// Interrupted: it ran when somebody stopped the run.
	Interrupted Status = "interrupted"
)

// Statuses returns all statuses, in the order in which a reader wants to see them.
func Statuses() []Status {
	return []Status{Failed, Interrupted, Blocked, NotTested, NotApplicable, Passed}
}

// Exchange is one request and its answer.
type Exchange struct {
	Kind Kind `json:"kind"`
	// Operation is the name of the API's operation, such as "disk_create", or of the RPC.
	Operation string `json:"operation"`
	// Method, Path and Status (a code of HTTP) are those of an API call.
	Method string `json:"method,omitempty"`
	Path   string `json:"path,omitempty"`
	Status int    `json:"status,omitempty"`
	// Code is the gRPC code of an RPC, such as "AlreadyExists".
	Code string `json:"code,omitempty"`
	// ErrorCode is the API's error code, or the driver's reason.
	ErrorCode string `json:"error_code,omitempty"`
	RequestID string `json:"request_id,omitempty"`
	// Milliseconds is the time from the request to the end of the answer, in milliseconds.
	Milliseconds float64 `json:"milliseconds"`
	// Answer is an excerpt of the answer. Redact before you cut: half a secret is not found.
	Answer string `json:"answer,omitempty"`
}

// Kind of a call.
type Kind string

// The kinds of calls.
const (
	API Kind = "api"
	RPC Kind = "rpc"
)

// Ledger counts what existed before and after the run.
type Ledger struct {
	// Before and After count objects by their kind: disks, snapshots, instances, attachments,
	// devices, mounts.
	Before map[string]int `json:"before"`
	After  map[string]int `json:"after"`
	// Left names each object of the run that still exists, or that the driver should have deleted
	// and the run had to.
	Left []string `json:"left"`
}

// Witness is a second account of the run, which the results are compared with.
type Witness struct {
	// Source is where it comes from: "the rack's request log", "this program's own record".
	Source string `json:"source"`
	// Findings are its contradictions of the results, one sentence each. A run with one does not
	// conform.
	Findings []string `json:"findings"`
}
