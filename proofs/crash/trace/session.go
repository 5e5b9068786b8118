//go:build linux

package trace

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// session is the watch over one process and what it starts. Only the thread that seized the process
// may use it, except for release.
type session struct {
	order  Order
	report Report

	threads map[int]*thread
	// known are all that there ever were.
	known map[int]bool
	// programs are the tools by process; the watched process itself has its name from the order.
	programs map[int]string
	counts   map[string]int
	sockets  map[string]socketKind

	// answered reports whether an RPC, or a request, has been answered.
	answered bool
	// answers is the descriptor at which the answer will be read after which to kill, else -1.
	answers int
	// held are threads that were stopped when the process was killed; they do not go on before it
	// is dead.
	held []int
	// dead reports whether the process has ended; its tools may not have.
	dead bool
	// paused tells the watcher that the process stands still; goOn then ends that.
	paused  func() error
	goOn    chan struct{}
	resumed sync.Once
	// letGo is set by release: everything is to be left alone.
	letGo    atomic.Bool
	detached bool
}

// thread is a traced thread.
type thread struct {
	pid int
	// doing is the index of the effect it is in the middle of, -1 for none.
	doing int
}

// begin seizes every thread of a process, and lets all run on.
func begin(order Order) (*session, error) {
	s := &session{
		order: order, threads: map[int]*thread{}, known: map[int]bool{},
		programs: map[int]string{}, counts: map[string]int{},
		sockets: map[string]socketKind{}, answers: -1, goOn: make(chan struct{}),
	}
	for {
		tids, err := threads(order.PID)
		if err != nil {
			return nil, err
		}
		fresh := false
		for _, tid := range tids {
			if s.threads[tid] != nil {
				continue
			}
			fresh = true
			if err := seize(tid); errors.Is(err, unix.ESRCH) {
				continue // it ended since the directory was read
			} else if err != nil && !errors.Is(err, unix.EPERM) {
				// EPERM: a thread that a seized one has made is traced already.
				return nil, fmt.Errorf("seize thread %d: %w", tid, err)
			}
			s.add(tid, order.PID)
			// It runs free of stops at system calls until it has stopped once.
			if err := interrupt(tid); err != nil && !errors.Is(err, unix.ESRCH) {
				return nil, fmt.Errorf("interrupt thread %d: %w", tid, err)
			}
		}
		if !fresh {
			return s, s.firstStops()
		}
	}
}

// firstStops waits until every thread has stopped once and so reports its system calls.
func (s *session) firstStops() error {
	waiting := map[int]bool{}
	for tid := range s.threads {
		waiting[tid] = true
	}
	for len(waiting) > 0 {
		tid, status, err := wait()
		if err != nil {
			return err
		}
		delete(waiting, tid)
		if err := s.step(tid, status); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for the next stop or end of a traced thread.
func wait() (tid int, status syscall.WaitStatus, err error) {
	for {
		tid, err = syscall.Wait4(-1, &status, syscall.WALL, nil)
		if !errors.Is(err, syscall.EINTR) {
			return tid, status, err
		}
	}
}

// run handles stops until the process is released, or is dead with all that it started.
func (s *session) run() error {
	for len(s.threads) > 0 {
		if s.letGo.Load() && !s.detached && !s.report.Killed {
			s.detached = true
			for tid := range s.threads {
				_ = interrupt(tid) // one that ends meanwhile says so
			}
		}
		tid, status, err := wait()
		if errors.Is(err, syscall.ECHILD) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("wait for traced threads: %w", err)
		}
		if err := s.step(tid, status); err != nil {
			return err
		}
	}
	return nil
}

// release makes run leave the process alone. It may be called by any thread. The signal is one that
// Go programs take for a stray one; it wakes the waiting tracer.
func (s *session) release() {
	s.letGo.Store(true)
	_ = unix.Kill(s.order.PID, unix.SIGURG)
}

// step handles one stop or end.
func (s *session) step(tid int, status syscall.WaitStatus) error {
	if status.Exited() || status.Signaled() {
		s.ended(tid)
		return nil
	}
	t := s.threads[tid]
	if t == nil { // a new one
		t = s.add(tid, processOf(tid))
	}
	var err error
	pass := unix.Signal(0)
	sig := status.StopSignal()
	event := int(status) >> 16
	switch {
	case sig == syscallStop:
		err = s.atSyscall(tid, t)
	case event == unix.PTRACE_EVENT_EXEC:
		s.programs[t.pid] = comm(t.pid)
	case event == unix.PTRACE_EVENT_CLONE, event == unix.PTRACE_EVENT_FORK,
		event == unix.PTRACE_EVENT_VFORK:
		err = s.expect(tid)
	case event != 0: // the first stop of a new one, or the stop that was asked for
	default:
		pass = sig
	}
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil // killed meanwhile; its end comes next
	case err != nil:
		return err
	case s.report.Killed && !s.dead:
		s.held = append(s.held, tid)
		return nil
	case s.detached || s.report.Killed:
		return s.leave(tid, pass)
	}
	return gone(resume(tid, pass))
}

func (s *session) add(tid, pid int) *thread {
	t := &thread{pid: pid, doing: -1}
	s.threads[tid], s.known[tid] = t, true
	return t
}

// expect notes the thread that a stopped one has made, which may not have stopped yet: while it is
// not let go, the session is not over.
func (s *session) expect(maker int) error {
	made, err := unix.PtraceGetEventMsg(maker)
	if tid := int(made); err == nil && !s.known[tid] {
		s.add(tid, processOf(tid))
	}
	return err
}

// gone takes a thread that was killed meanwhile for a success; its end is reported.
func gone(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// leave lets a stopped thread go its own way. A tool that still lives when its process was killed
// is an orphan.
func (s *session) leave(tid int, pass unix.Signal) error {
	t := s.threads[tid]
	if s.report.Killed && t != nil && t.pid != s.order.PID && !dying(tid) {
		s.report.Orphans = append(s.report.Orphans, s.program(t.pid))
	}
	err := detach(tid, pass)
	if err == nil {
		delete(s.threads, tid)
	}
	return gone(err)
}

// dying reports whether a stopped thread has been killed already and will not go on.
func dying(tid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return true
	}
	const kill = 1 << (unix.SIGKILL - 1)
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		var pending uint64
		if _, err := fmt.Sscanf(strings.TrimSpace(value), "%x", &pending); err == nil &&
			pending&kill != 0 {
			return true
		}
	}
	return false
}

func (s *session) ended(tid int) {
	delete(s.threads, tid)
	if tid != s.order.PID {
		return
	}
	s.dead = true
	held := s.held
	s.held = nil
	for _, tid := range held {
		if s.threads[tid] != nil {
			_ = s.leave(tid, 0)
		}
	}
	// What still runs was started by the process; it is left alone at its next stop.
	for tid := range s.threads {
		_ = interrupt(tid)
	}
}

// program is what the effects of a process are listed under.
func (s *session) program(pid int) string {
	if pid == s.order.PID {
		return s.order.As
	}
	if name := s.programs[pid]; name != "" {
		return name
	}
	return s.order.As // a copy of it that is about to become a tool
}

func comm(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(name))
}

// atSyscall looks at a thread that stands at the entry or the exit of a system call.
func (s *session) atSyscall(tid int, t *thread) error {
	info, err := look(tid)
	switch {
	case err != nil:
		return err
	case info.entry():
		return s.enter(call{session: s, syscallInfo: info, tid: tid}, t)
	case info.exit():
		return s.leaveCall(t, info)
	}
	return nil
}

// enter notes an effect that is about to happen.
func (s *session) enter(c call, t *thread) error {
	t.doing = -1
	if s.answers >= 0 && t.pid == s.order.PID && c.descriptor() == s.answers &&
		slices.Contains(readCalls, c.number()) {
		t.doing = reading
		return nil
	}
	r, known := rules[c.number()]
	if !known || s.report.Killed {
		return nil
	}
	e, ok := r.effect(c)
	if !ok {
		return nil
	}
	e.Program = s.program(t.pid)
	if e.Call == "" {
		e.Call = r.name
	}
	s.counts[e.Name()]++
	e.N = s.counts[e.Name()]
	t.doing = len(s.report.Effects)
	s.report.Effects = append(s.report.Effects, e)
	if e.Request && s.here(e, After) {
		s.answers = c.descriptor()
	}
	if s.here(e, Before) {
		return s.actAt()
	}
	return nil
}

// readCalls are those in which an answer comes.
var readCalls = []uint64{unix.SYS_READ, unix.SYS_READV, unix.SYS_RECVFROM}

// reading is what a thread does that may read the answer after which to kill.
const reading = -2

// leaveCall notes how an effect ended.
func (s *session) leaveCall(t *thread, info syscallInfo) error {
	doing := t.doing
	t.doing = -1
	switch {
	case s.report.Killed:
	case doing == reading:
		if info.result() > 0 {
			return s.actAt()
		}
	case doing >= 0:
		e := &s.report.Effects[doing]
		e.Failed = info.result() < 0
		if e.Request && s.here(*e, Sent) || !e.Request && s.here(*e, After) {
			return s.actAt()
		}
	}
	return nil
}

func (s *session) here(e Effect, phase Phase) bool {
	k := s.order.Kill
	if k == nil || k.Phase != phase {
		return false
	}
	if k.Name == "" { // any effect
		return k.N == len(s.report.Effects)
	}
	return k.N == e.N && k.Name == e.Name()
}

// resume ends a pause, or a later one; the second time it does nothing.
func (s *session) resume() { s.resumed.Do(func() { close(s.goOn) }) }

// actAt carries out the order at the point.
func (s *session) actAt() error {
	if !s.order.Kill.Pause {
		s.kill()
		return nil
	}
	if s.report.Paused {
		return nil
	}
	// Threads that still run stop at their next system call, and nobody lets them go on.
	s.report.Paused = true
	err := s.paused()
	<-s.goOn
	return err
}

// kill ends the process while the thread that reached the point stands still. A system call that it
// is about to make is not made.
func (s *session) kill() {
	s.report.Killed = true
	_ = unix.Kill(s.order.PID, unix.SIGKILL)
	if s.order.Kill.Group {
		for _, t := range s.threads {
			_ = unix.Kill(t.pid, unix.SIGKILL)
		}
	}
}
