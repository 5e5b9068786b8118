// Package report is the report of one run of oxide-conformance against a rack.
//
// [Write] writes a report into a folder: report.json for programs (its JSON Schema is
// report.schema.json in this package), junit.xml for CI, and index.html for people, one page that
// loads nothing and runs no script. [Read] reads a folder back, and [Diff] compares two reports.
//
// No file contains a secret that the caller has passed to Write.
package report

import (
	"math"
	"slices"
	"time"
)

// SchemaVersion is the version of report.json that this package writes and reads. It changes when
// a property changes.
const SchemaVersion = 2

// Report has the results of one run. A slice or map may be nil, which report.json shows as empty.
type Report struct {
	// Schema is the version of the format, SchemaVersion.
	Schema  int     `json:"schema"`
	Verdict Verdict `json:"verdict"`
	// Why gives the reason for the verdict in one sentence.
	Why      string    `json:"why"`
	Run      Run       `json:"run"`
	Rack     RackFacts `json:"rack"`
	Versions Versions  `json:"versions"`
	// Preflight has the checks before the run, in their order.
	Preflight []Line   `json:"preflight"`
	Results   []Result `json:"results"`
	// Calls has the latencies, one entry for each operation of the API and each RPC.
	Calls   []Calls `json:"calls"`
	Ledger  Ledger  `json:"ledger"`
	Witness Witness `json:"witness"`
	// CleanUp is the command that removes the remains of this run from the rack and the machine.
	CleanUp string `json:"clean_up"`
}

// Verdict is the result of a run. One failed result decides it.
type Verdict string

// These are the verdicts, from the best to the worst.
const (
	// Conforms means that everything that was tested passed.
	Conforms Verdict = "conforms"
	// BlockedByRack means that nothing failed, but the rack lacks a feature that a part of the run
	// needs.
	BlockedByRack Verdict = "blocked"
	// Incomplete means that nothing failed, but the run could not be completed.
	Incomplete Verdict = "incomplete"
	// InterruptedRun means that nothing failed, but somebody stopped the run.
	InterruptedRun Verdict = "interrupted"
	// DoesNotConform means that at least one result failed, that the run left something, or that the
	// witness contradicted it.
	DoesNotConform Verdict = "does not conform"
)

// Run identifies the run and describes how it was started.
type Run struct {
	ID string `json:"id"`
	// Mark begins the names of all objects that the run creates.
	Mark  string    `json:"mark"`
	Began time.Time `json:"began"`
	Ended time.Time `json:"ended"`
	// Machine is the host name of the machine that ran the program.
	Machine string `json:"machine"`
	// Instance is the name of this machine's instance. Second is the name of the instance to which
	// volumes moved. Helper is the name of the instance that was started and stopped. A name is
	// empty if there was no such instance.
	Instance string `json:"instance"`
	Second   string `json:"second"`
	Helper   string `json:"helper"`
	// Command is the program with its verb and the names of its flags.
	Command []string `json:"command"`
	// Selected are the groups that were to run.
	Selected []string `json:"selected"`
	// Budget is the limit of the run, in words: "12 disks of 2 GiB, 40 min".
	Budget string `json:"budget"`
}

// RackFacts describes the rack of the run.
type RackFacts struct {
	Host       string `json:"host"`
	APIVersion string `json:"api_version"`
	Project    string `json:"project"`
	// HotPlug states whether the rack attaches disks to running instances.
	HotPlug HotPlug `json:"hot_plug"`
	// Release is the operator's name for the rack's release, because the API does not report one.
	Release string `json:"release"`
	// Simulated is true for a simulated rack. Its results prove nothing about a real one.
	Simulated bool `json:"simulated"`
}

// HotPlug states whether a rack attaches disks to running instances.
type HotPlug string

// These are the values of HotPlug.
const (
	HotPlugYes HotPlug = "yes"
	HotPlugNo  HotPlug = "no"
	// HotPlugAttachOnly means that running instances gain disks and lose none.
	HotPlugAttachOnly HotPlug = "attach only"
	HotPlugUnknown    HotPlug = "unknown"
)

// Versions are the versions of the programs and systems of the run.
type Versions struct {
	Suite  string `json:"suite"`
	Driver string `json:"driver"`
	SDK    string `json:"sdk"`
	Go     string `json:"go"`
	Kernel string `json:"kernel"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	// Tools are the versions of the programs that the driver runs, such as mkfs.ext4.
	Tools map[string]string `json:"tools"`
}

// Line is one check of the preflight.
type Line struct {
	Name   string     `json:"name"`
	Status LineStatus `json:"status"`
	// Found is the result of the check. Advice is what the operator should do, if anything.
	Found  string `json:"found"`
	Advice string `json:"advice"`
}

// LineStatus is the result of a check of the preflight.
type LineStatus string

// These are the results of a check.
const (
	Pass LineStatus = "pass"
	Warn LineStatus = "warn"
	Fail LineStatus = "fail"
	Skip LineStatus = "skip"
)

// Result is the result of one rule or spec.
type Result struct {
	// Group is the result's group: "rules", "ext4", "xfs", "btrfs", "block" or "data".
	Group string `json:"group"`
	// ID is short and unique in its group, such as "A12". A spec without an ID has only its name.
	ID     string `json:"id"`
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Seconds is the duration in seconds.
	Seconds float64 `json:"seconds"`
	// Reason explains a result that failed, or that was blocked, not tested or interrupted. It is
	// empty if the result passed.
	Reason string `json:"reason"`
	// Tries is the number of times that it ran.
	Tries int `json:"tries"`
	// Source cites the source of a rule.
	Source string `json:"source"`
	// Extent states how far the test looked. A result that passed has one.
	Extent Extent `json:"extent"`
	// Evidence has the requests and answers, in order.
	Evidence []LoggedCall `json:"evidence"`
}

// Status is the status of a result.
type Status string

// These are the statuses of results.
const (
	Passed Status = "passed"
	Failed Status = "failed"
	// Blocked means that the rack lacks a feature that the spec needs.
	Blocked Status = "blocked"
	// NotTested means that this run did not try the spec, for another reason.
	NotTested Status = "not_tested"
	// NotApplicable means that the spec is about a feature that the driver does not offer.
	NotApplicable Status = "not_applicable"
	// Interrupted means that the spec ran when somebody stopped the run.
	Interrupted Status = "interrupted"
)

// Statuses returns all statuses, in the order in which a reader wants to see them.
func Statuses() []Status {
	return []Status{Failed, Interrupted, Blocked, NotTested, NotApplicable, Passed}
}

// LoggedCall is one request and its answer.
type LoggedCall struct {
	Kind Kind `json:"kind"`
	// Operation is the name of the API's operation, such as "disk_create", or of the RPC.
	Operation string `json:"operation"`
	// Method, Path and Status (an HTTP status) belong to a call of the API.
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
	// Answer is an excerpt of the answer. Redact an answer before you cut it, because Write does not
	// find half a secret.
	Answer string `json:"answer,omitempty"`
}

// Kind is the kind of a call.
type Kind string

// These are the kinds of calls.
const (
	API Kind = "api"
	RPC Kind = "rpc"
)

// Ledger counts what existed before and after the run.
type Ledger struct {
	// Before and After count objects by kind: disks, snapshots, instances, attachments, devices,
	// mounts.
	Before map[string]int `json:"before"`
	After  map[string]int `json:"after"`
	// Left names the objects of the run that still exist, and those that the run had to delete
	// because the driver did not.
	Left []string `json:"left"`
}

// Witness is a second record of the run, with which the results are compared.
type Witness struct {
	// Source names the record: "the rack's request log", "this program's own record".
	Source string `json:"source"`
	// Findings are the contradictions between the record and the results, one sentence each. A run
	// with a finding does not conform.
	Findings []string `json:"findings"`
}

// maxSamples is the number of latencies of an operation that a report keeps.
const maxSamples = 1000

// Calls has the latencies of one operation. [NewCalls] accepts samples in any order and number.
type Calls struct {
	Kind      Kind   `json:"kind"`
	Operation string `json:"operation"`
	// Count is the number of calls. Failed is the number of calls that were answered with an error.
	Count  int `json:"count"`
	Failed int `json:"failed"`
	// Milliseconds are the latencies in milliseconds, sorted. If there were more than 1000 calls, it
	// has 1000 evenly spaced latencies, including the shortest and the longest.
	Milliseconds []float64 `json:"milliseconds"`
}

// NewCalls returns the latencies of an operation from samples in milliseconds.
func NewCalls(kind Kind, operation string, failed int, milliseconds []float64) Calls {
	sorted := slices.Sorted(slices.Values(milliseconds))
	calls := Calls{Kind: kind, Operation: operation, Count: len(sorted), Failed: failed,
		Milliseconds: sorted}
	if len(sorted) > maxSamples {
		calls.Milliseconds = make([]float64, maxSamples)
		for i := range maxSamples {
			calls.Milliseconds[i] = sorted[i*(len(sorted)-1)/(maxSamples-1)]
		}
	}
	return calls
}

// Quantile returns the latency in milliseconds that the share q (0 to 1) of the calls did not
// exceed. The result is a sample, chosen by nearest rank, or 0 if there is none.
func (c Calls) Quantile(q float64) float64 {
	if len(c.Milliseconds) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(c.Milliseconds))))
	return c.Milliseconds[min(max(rank, 1), len(c.Milliseconds))-1]
}
