// Package trace follows a running, unmodified process with ptrace, numbers its external effects,
// and kills or pauses the process at a chosen effect.
//
// A tracer is a separate process (Serve), for two reasons: the kernel binds a traced process to one
// thread of its tracer, and the parent of a traced process would be woken at each of its stops. A
// Watcher starts a tracer and gives it orders.
package trace

import "fmt"

// Phase is a moment relative to an effect. The process is killed or paused at this moment.
type Phase string

// An effect has these phases. Only a request has the phase Sent: the process has sent the request,
// and the answer has not arrived.
const (
	Before Phase = "before"
	Sent   Phase = "sent"
	After  Phase = "after"
)

// Effect is a change that the process, or a program that it runs, makes outside of its memory.
type Effect struct {
	// Program is the name of the watched process, or of a tool that it runs.
	Program string `json:"program"`
	// Call is the name of the system call, or the method of an HTTP request.
	Call string `json:"call"`
	// Target is the object of the call, such as a path. Parts that differ between runs are replaced.
	Target string `json:"target"`
	// N counts the effects of the same program, call and target from 1.
	N int `json:"n"`
	// Failed is set if the kernel refused the call, so that it had no effect.
	Failed bool `json:"failed,omitempty"`
	// Request is set if the effect is a request that gets an answer. Only requests have the phase
	// Sent.
	Request bool `json:"request,omitempty"`
}

// Name returns the name of the effect, without its count.
func (e Effect) Name() string { return e.Program + ": " + e.Call + " " + e.Target }

// Kind returns the name of the effect without its target.
func (e Effect) Kind() string { return e.Program + ": " + e.Call }

// Phases returns the phases of the effect in which a process can be killed.
func (e Effect) Phases() []Phase {
	if e.Request {
		return []Phase{Before, Sent, After}
	}
	return []Phase{Before, After}
}

// Point is a phase of the N-th effect with the name or, if the name is empty, of the N-th effect.
type Point struct {
	Name  string `json:"name"`
	N     int    `json:"n"`
	Phase Phase  `json:"phase"`
	// Group also kills the tools of the process, as the end of its container or machine would.
	Group bool `json:"group"`
	// Pause pauses the process and its tools at the point until the watcher resumes them. It kills no
	// process.
	Pause bool `json:"pause,omitempty"`
}

func (p Point) String() string {
	whom := "alone"
	switch {
	case p.Pause:
		whom = "paused"
	case p.Group:
		whom = "with its tools"
	}
	return fmt.Sprintf("%s %q #%d, %s", p.Phase, p.Name, p.N, whom)
}

// Report describes the effects of a watched process between Watch and Release.
type Report struct {
	Effects []Effect `json:"effects"`
	// Killed reports whether the process reached the point and was killed there.
	Killed bool `json:"killed"`
	// Paused reports whether the process reached the point and was paused there.
	Paused bool `json:"paused,omitempty"`
	// Orphans are programs that the process had started, and that still ran when it was dead.
	Orphans []string `json:"orphans,omitempty"`
	Error   string   `json:"error,omitempty"`
	// Over is set if this is the last report, because the process is released or dead.
	Over bool `json:"over,omitempty"`
}

// Order names the process to watch, and the point at which to kill or pause it.
type Order struct {
	PID int `json:"pid"`
	// As is the name of the process in Effect.Program.
	As string `json:"as"`
	// Rack is the port of the rack's API. A write to a connection to this port is a request. If the
	// process itself listens on this port, its write is an answer.
	Rack uint16 `json:"rack"`
	// Root is removed from the names of paths below it.
	Root string `json:"root"`
	// Logs are paths of files. Writes to them are no effects.
	Logs []string `json:"logs"`
	Kill *Point   `json:"kill,omitempty"`
}
