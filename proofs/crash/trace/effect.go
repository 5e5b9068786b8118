package trace

import "fmt"

// Phase says when, around an effect, the process is killed.
type Phase string

// The phases of an effect. Sent is for requests only: the answer is not there yet, and nobody can
// tell whether the other side has done anything.
const (
	Before Phase = "before"
	Sent   Phase = "sent"
	After  Phase = "after"
)

// Effect is something that the process, or a program that it runs, did to the world outside its
// memory.
type Effect struct {
	// Program is the name under which the process is watched, or that of a tool it runs.
	Program string `json:"program"`
	// Call is the system call, or the method of a request over HTTP.
	Call string `json:"call"`
	// Target is what it was done to, without what differs from run to run.
	Target string `json:"target"`
	// N counts the effects of the same program, call and target from 1.
	N int `json:"n"`
	// Failed reports whether the kernel refused, so that nothing happened.
	Failed bool `json:"failed,omitempty"`
	// Request reports whether it has an answer, and so the phase Sent.
	Request bool `json:"request,omitempty"`
}

// Name is the effect without its count.
func (e Effect) Name() string { return e.Program + ": " + e.Call + " " + e.Target }

// Kind is what many effects have in common.
func (e Effect) Kind() string { return e.Program + ": " + e.Call }

// Phases are those in which a process can be killed around the effect.
func (e Effect) Phases() []Phase {
	if e.Request {
		return []Phase{Before, Sent, After}
	}
	return []Phase{Before, After}
}

// Point is a place in the life of a process: the N-th effect of that name; without a name, the N-th
// of all.
type Point struct {
	Name  string `json:"name"`
	N     int    `json:"n"`
	Phase Phase  `json:"phase"`
	// Group kills the tools that the process runs at the same instant, as the end of a container
	// or of a machine does. Otherwise only the process itself is killed.
	Group bool `json:"group"`
	// Pause lets the process stand still at the point, with its tools, instead of killing it, until
	// the watcher resumes it.
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

// Report is what a watched process did between Watch and Release.
type Report struct {
	Effects []Effect `json:"effects"`
	// Killed reports whether the point was reached, and the process killed there.
	Killed bool `json:"killed"`
	// Paused reports whether the point was reached, and the process stood still there.
	Paused bool `json:"paused,omitempty"`
	// Orphans are programs that went on when the process they worked for was dead.
	Orphans []string `json:"orphans,omitempty"`
	Error   string   `json:"error,omitempty"`
	// Over reports whether nothing follows: the process is released, or dead.
	Over bool `json:"over,omitempty"`
}

// Order says whom to watch and where to kill or pause it.
type Order struct {
	PID int `json:"pid"`
	// As is what the process is called in the names of effects.
	As string `json:"as"`
	// Rack is the port of the rack's API: what is written to a connection there is a request, and
	// what the process that listens there writes to one is an answer.
	Rack uint16 `json:"rack"`
	// Root is left out of the names of paths below it.
	Root string `json:"root"`
	// Logs are files whose writes are no effects.
	Logs []string `json:"logs"`
	Kill *Point   `json:"kill,omitempty"`
}
