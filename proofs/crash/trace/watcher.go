//go:build linux

// Package trace follows a running, unmodified process with ptrace, numbers its external effects,
// and kills or pauses the process at a chosen effect.
//
// A tracer is a separate process (Main), for two reasons. First, the kernel binds a traced process
// to one thread of its tracer. Second, a wait for a traced child also returns at each stop, but the
// test's wait must return only at the child's end. A Watcher starts a tracer and sends it orders.
package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// Phase tells whether the process is killed or paused before, during or after an effect.
type Phase string

// Sent is a phase of requests only: the request has left the process, but no answer has arrived.
const (
	Before Phase = "before"
	Sent   Phase = "sent"
	After  Phase = "after"
)

// Effect is a change that the process, or a program that it runs, makes outside of its memory.
type Effect struct {
	// Program is the name of the watched process, or of a tool that it runs.
	Program string `json:"program"`
	// Call is the name of the system call, or the method of the HTTP request.
	Call string `json:"call"`
	// Target is the object of the call, such as a path, without the parts that differ between runs.
	Target string `json:"target"`
	// N is the effect's number, from 1, among the effects of the same program, call and target.
	N int `json:"n"`
	// Failed is set if the system call returned an error, and so had no effect.
	Failed bool `json:"failed,omitempty"`
	// Request is set if the effect is a request to the rack.
	Request bool `json:"request,omitempty"`
}

// Name returns the effect's program, call and target.
func (e Effect) Name() string { return e.Program + ": " + e.Call + " " + e.Target }

// Kind returns the effect's program and call.
func (e Effect) Kind() string { return e.Program + ": " + e.Call }

// Phases returns the phases of the effect in which a process can be killed.
func (e Effect) Phases() []Phase {
	if e.Request {
		return []Phase{Before, Sent, After}
	}
	return []Phase{Before, After}
}

// Point is a phase of the N-th effect that is called Name.
type Point struct {
	Name  string `json:"name"`
	N     int    `json:"n"`
	Phase Phase  `json:"phase"`
	// If Group is set, the process's tools are killed, too, as when its container or machine ends.
	Group bool `json:"group"`
	// If Pause is set, the process and its tools are not killed, but paused until the watcher resumes
	// them.
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

// Report contains what a process did between Watch and Release.
type Report struct {
	Effects []Effect `json:"effects"`
	Killed  bool     `json:"killed"`
	Paused  bool     `json:"paused,omitempty"`
	// Orphans are tools of the process that still ran when the process was dead.
	Orphans []string `json:"orphans,omitempty"`
	Error   string   `json:"error,omitempty"`
	// Over is set in the last report, when the process is released or dead.
	Over bool `json:"over,omitempty"`
}

// Order contains the process to watch, and the point at which the tracer kills or pauses it.
type Order struct {
	PID int `json:"pid"`
	// As names the process in Effect.Program.
	As string `json:"as"`
	// Rack is the port of the rack's API. A write to a connection to this port is a request. If the
	// process itself listens on this port, it is the rack, and its writes are answers.
	Rack uint16 `json:"rack"`
	// Root is a prefix that is removed from paths.
	Root string `json:"root"`
	// Logs are paths of files. The tracer does not count a write to them as an effect.
	Logs []string `json:"logs"`
	Kill *Point   `json:"kill,omitempty"`
}

// Watcher controls a tracer, which watches one process at a time.
type Watcher struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	orders *json.Encoder
	said   *json.Decoder
}

// tracer is the environment variable with which the program runs as a tracer.
const tracer = "CRASH_TRACER"

// Main runs a tracer and exits if NewWatcher has started this program. Otherwise it does nothing.
func Main() {
	if os.Getenv(tracer) == "" {
		return
	}
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "tracer:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// NewWatcher starts this program again as a tracer. So the program must call Main first.
func NewWatcher() (*Watcher, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start a tracer: %w", err)
	}
	cmd := exec.Command(self)
	// By default, the race detector delays the end of a program by a second.
	cmd.Env = append(os.Environ(), tracer+"=1", "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	// An interrupt from the terminal must reach only the test process, which then ends the tracer.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, errIn := cmd.StdinPipe()
	stdout, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut); err != nil {
		return nil, fmt.Errorf("start a tracer: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a tracer: %w", err)
	}
	return &Watcher{cmd: cmd, stdin: stdin, orders: json.NewEncoder(stdin),
		said: json.NewDecoder(stdout)}, nil
}

// message orders the tracer to watch a process or to end a pause. An empty message orders it to
// release the process.
type message struct {
	Watch  *Order `json:"watch,omitempty"`
	Resume bool   `json:"resume,omitempty"`
}

// Watch starts to watch a process. When Watch returns, the tracer traces every thread of the
// process. The caller must then call Release or ReleaseAtPause.
func (w *Watcher) Watch(order Order) error {
	report, err := w.ask(message{Watch: &order})
	if err != nil {
		return fmt.Errorf("watch process %d: %w", order.PID, err)
	}
	if report.Error != "" {
		return fmt.Errorf("watch process %d: %s", order.PID, report.Error)
	}
	return nil
}

// Release lets the process continue if it still runs, and returns a report of its effects.
func (w *Watcher) Release() (Report, error) { return w.finish(w.ask(message{})) }

// ReleaseAtPause replaces Release for an order with Pause. It calls do(), which makes the process
// work. At a pause before the end of do(), it calls meanwhile() and then ends the pause.
func (w *Watcher) ReleaseAtPause(do, meanwhile func()) (Report, error) {
	paused, done := make(chan answer, 1), make(chan struct{})
	go func() {
		var a answer
		a.err = w.said.Decode(&a.report)
		paused <- a
	}()
	go func() {
		defer close(done)
		do()
	}()
	var first answer
	select {
	case <-done:
		// If the process pauses only now, this message also ends the pause.
		err := w.orders.Encode(message{})
		if first = <-paused; err != nil || !first.report.Paused || first.report.Over {
			return w.finish(first.report, errors.Join(err, first.err))
		}
		var last answer
		last.err = w.said.Decode(&last.report)
		return w.finish(last.report, last.err)
	case first = <-paused:
	}
	if first.err == nil && first.report.Error == "" {
		meanwhile()
	}
	err := errors.Join(first.err, w.orders.Encode(message{Resume: true}))
	<-done
	if err != nil {
		return w.finish(first.report, err)
	}
	return w.Release()
}

type answer struct {
	report Report
	err    error
}

func (w *Watcher) finish(report Report, err error) (Report, error) {
	if err == nil && report.Error != "" {
		err = errors.New(report.Error)
	}
	if err != nil {
		return report, fmt.Errorf("watch a process: %w", err)
	}
	return report, nil
}

func (w *Watcher) ask(m message) (report Report, err error) {
	if err := w.orders.Encode(m); err != nil {
		return report, err
	}
	err = w.said.Decode(&report)
	return report, err
}

// Close ends the tracer. The caller must have released the watched process.
func (w *Watcher) Close() error {
	return errors.Join(w.stdin.Close(), w.cmd.Wait())
}

func serve(in io.Reader, out io.Writer) error {
	// The kernel accepts ptrace requests only from the thread that seized the process.
	runtime.LockOSThread()
	orders, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var m message
		err := orders.Decode(&m)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read an order: %w", err)
		case m.Watch == nil:
			return errors.New("an order to release comes before an order to watch")
		}
		if err := watch(*m.Watch, orders, reports); err != nil {
			return err
		}
	}
}

func watch(order Order, orders *json.Decoder, reports *json.Encoder) error {
	s, err := begin(order)
	if err != nil {
		return reports.Encode(Report{Error: err.Error()})
	}
	if err := reports.Encode(Report{}); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	s.paused = func() error { return reports.Encode(Report{Paused: true}) }
	released := make(chan error, 1)
	go func() {
		var m message
		err := orders.Decode(&m)
		if err == nil && m.Resume {
			s.resume()
			m = message{}
			err = orders.Decode(&m)
		}
		s.release()
		s.resume()
		released <- err
	}()
	failed := s.run()
	if err := <-released; err != nil {
		return fmt.Errorf("read an order: %w", err)
	}
	if failed != nil {
		s.report.Error = failed.Error()
	}
	s.report.Over = true
	if err := reports.Encode(s.report); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}
