//go:build linux

package trace

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tracing watches one process and the programs that it starts. Only the thread that seized the
// process may call its methods, except release and resume.
type tracing struct {
	order  Order
	report Report

	threads map[int]*thread
	// known contains all threads that the tracer has ever traced.
	known map[int]bool
	// programs maps the process IDs of tools to their names.
	programs map[int]string
	counts   map[string]int
	sockets  map[string]socketKind

	// answered is set after the process's first answer. Its later answers do not count as effects.
	answered bool
	// answers is -1, or the descriptor from which the process reads a request's answer. After this
	// read, the tracer kills the process.
	answers int
	// held contains threads that stopped after the process was killed. They stay stopped until the
	// process has ended.
	held []int
	// dead is set after the process has ended. Its tools may still run.
	dead bool
	// paused sends a report that the process is paused. The pause lasts until goOn is closed.
	paused  func() error
	goOn    chan struct{}
	resumed sync.Once
	// After release() has set letGo, run() detaches from all threads.
	letGo    atomic.Bool
	detached bool
}

type thread struct {
	pid int
	// doing is the index of the thread's present call in report.Effects, or the constant "reading", or
	// -1 if there is no such call.
	doing int
}

// begin seizes every thread of a process. The threads continue.
func begin(order Order) (*tracing, error) {
	s := &tracing{
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
			if err := ptrace(unix.PTRACE_SEIZE, tid, 0, options); errors.Is(err, unix.ESRCH) {
				continue // it ended since the directory was read
			} else if err != nil && !errors.Is(err, unix.EPERM) {
				// EPERM is no failure: a seized thread has created this thread, so it is already traced.
				return nil, fmt.Errorf("seize thread %d: %w", tid, err)
			}
			s.add(tid, order.PID)
			// A thread stops at system calls only after its first stop, so stop it now.
			if err := interrupt(tid); err != nil && !errors.Is(err, unix.ESRCH) {
				return nil, fmt.Errorf("interrupt thread %d: %w", tid, err)
			}
		}
		if !fresh {
			return s, s.firstStops()
		}
	}
}

// firstStops waits until every thread has stopped once.
func (s *tracing) firstStops() error {
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

// wait returns the next traced thread that stops or ends.
func wait() (tid int, status syscall.WaitStatus, err error) {
	for {
		tid, err = syscall.Wait4(-1, &status, syscall.WALL, nil)
		if !errors.Is(err, syscall.EINTR) {
			return tid, status, err
		}
	}
}

// run handles each stop of a thread, until release() or until the process and its tools have ended.
func (s *tracing) run() error {
	for len(s.threads) > 0 {
		if s.letGo.Load() && !s.detached && !s.report.Killed {
			s.detached = true
			for tid := range s.threads {
				_ = interrupt(tid) // if the thread ends now, wait reports it
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

// release makes run() detach from the process. Any thread may call it. The signal stops a traced
// thread, so that run() continues at once. SIGURG has no other effect on a Go program.
func (s *tracing) release() {
	s.letGo.Store(true)
	_ = unix.Kill(s.order.PID, unix.SIGURG)
}

func (s *tracing) step(tid int, status syscall.WaitStatus) error {
	if status.Exited() || status.Signaled() {
		s.ended(tid)
		return nil
	}
	t := s.threads[tid]
	if t == nil { // a new thread
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
	case event != 0: // the first stop of a new thread, or a stop by interrupt
	default:
		pass = sig
	}
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil // killed in the meantime; its end comes next
	case err != nil:
		return err
	case s.report.Killed && !s.dead:
		s.held = append(s.held, tid)
		return nil
	case s.detached || s.report.Killed:
		return s.leave(tid, pass)
	}
	return ignoreKilled(resume(tid, pass))
}

func (s *tracing) add(tid, pid int) *thread {
	t := &thread{pid: pid, doing: -1}
	s.threads[tid], s.known[tid] = t, true
	return t
}

// expect records the thread that maker has created, so that run() also waits for it.
func (s *tracing) expect(maker int) error {
	made, err := unix.PtraceGetEventMsg(maker)
	if tid := int(made); err == nil && !s.known[tid] {
		s.add(tid, processOf(tid))
	}
	return err
}

// ignoreKilled drops ESRCH, which means that the thread was killed. wait() reports its end later.
func ignoreKilled(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// leave detaches from a stopped thread. After a kill of the process, it reports the thread's tool
// as an orphan if the tool still lives.
func (s *tracing) leave(tid int, pass unix.Signal) error {
	t := s.threads[tid]
	if s.report.Killed && t != nil && t.pid != s.order.PID && !dying(tid) {
		s.report.Orphans = append(s.report.Orphans, s.program(t.pid))
	}
	err := ptrace(unix.PTRACE_DETACH, tid, 0, uintptr(pass))
	if err == nil {
		delete(s.threads, tid)
	}
	return ignoreKilled(err)
}

// dying reports whether a stopped thread has ended or has a pending SIGKILL.
func dying(tid int) bool {
	const kill = 1 << (unix.SIGKILL - 1)
	for _, field := range []string{"SigPnd", "ShdPnd"} {
		pending, err := strconv.ParseUint(statusOf(tid, field), 16, 64)
		if err != nil || pending&kill != 0 { // there is no status of an ended thread
			return true
		}
	}
	return false
}

func (s *tracing) ended(tid int) {
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
	// The remaining threads belong to tools. The tracer detaches from each when it stops.
	for tid := range s.threads {
		_ = interrupt(tid)
	}
}

func (s *tracing) program(pid int) string {
	if pid == s.order.PID {
		return s.order.As
	}
	if name := s.programs[pid]; name != "" {
		return name
	}
	return s.order.As // a child of the process, before its execve
}

func comm(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(name))
}

func (s *tracing) atSyscall(tid int, t *thread) error {
	info, err := syscallOf(tid)
	switch {
	case err != nil:
		return err
	case info.entry():
		return s.enter(call{tracing: s, syscallInfo: info, tid: tid}, t)
	case info.exit():
		return s.leaveCall(t, info)
	}
	return nil
}

func (s *tracing) enter(c call, t *thread) error {
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

var readCalls = []uint64{unix.SYS_READ, unix.SYS_READV, unix.SYS_RECVFROM}

// reading is the value of thread.doing during a read from the descriptor in tracing.answers.
const reading = -2

func (s *tracing) leaveCall(t *thread, info syscallInfo) error {
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

func (s *tracing) here(e Effect, phase Phase) bool {
	k := s.order.Kill
	return k != nil && k.Phase == phase && k.N == e.N && k.Name == e.Name()
}

// resume ends the pause, or prevents it if it has not begun. A second call does nothing.
func (s *tracing) resume() { s.resumed.Do(func() { close(s.goOn) }) }

func (s *tracing) actAt() error {
	if !s.order.Kill.Pause {
		s.kill()
		return nil
	}
	if s.report.Paused {
		return nil
	}
	// Each of the remaining threads stops at its next system call until the pause ends.
	s.report.Paused = true
	err := s.paused()
	<-s.goOn
	return err
}

// kill kills the process while one of its threads is stopped at the point. If this thread is at the
// entry of a system call, the kernel does not make the call.
func (s *tracing) kill() {
	s.report.Killed = true
	_ = unix.Kill(s.order.PID, unix.SIGKILL)
	if s.order.Kill.Group {
		for _, t := range s.threads {
			_ = unix.Kill(t.pid, unix.SIGKILL)
		}
	}
}

// With these options, the kernel also traces threads and programs that the traced process starts,
// and marks stops at system calls.
const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK |
	unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACEEXEC

// syscallStop is the signal of a thread that has stopped at a system call.
const syscallStop = unix.SIGTRAP | 0x80

func ptrace(request, tid int, addr, data uintptr) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func interrupt(tid int) error { return ptrace(unix.PTRACE_INTERRUPT, tid, 0, 0) }

// resume lets a stopped thread run to the entry or the exit of its next system call.
func resume(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_SYSCALL, tid, 0, uintptr(sig))
}

// syscallInfo is the kernel's struct ptrace_syscall_info (linux/ptrace.h), which is equal on all
// architectures.
type syscallInfo struct {
	op   uint8
	_    [3]uint8
	arch uint32
	ip   uint64
	sp   uint64
	// At the entry of a call, words contains its number and arguments. At the exit, it contains the
	// result and a flag for errors.
	words [8]uint64
}

func (i syscallInfo) entry() bool        { return i.op == unix.PTRACE_SYSCALL_INFO_ENTRY }
func (i syscallInfo) exit() bool         { return i.op == unix.PTRACE_SYSCALL_INFO_EXIT }
func (i syscallInfo) number() uint64     { return i.words[0] }
func (i syscallInfo) result() int64      { return int64(i.words[0]) }
func (i syscallInfo) arg(n int) uint64   { return i.words[1+n] }
func (i syscallInfo) descriptor() int    { return int(int32(i.arg(0))) }
func (i syscallInfo) flags(n int) uint64 { return i.arg(n) & 0xffffffff }

func syscallOf(tid int) (info syscallInfo, err error) {
	err = ptrace(unix.PTRACE_GET_SYSCALL_INFO, tid, unsafe.Sizeof(info),
		uintptr(unsafe.Pointer(&info)))
	return info, err
}

func threads(pid int) ([]int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	var tids []int
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids, nil
}

// statusOf returns a field of the thread's /proc status, or "" if the thread has ended.
func statusOf(tid int, field string) string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func processOf(tid int) int {
	pid, err := strconv.Atoi(statusOf(tid, "Tgid"))
	if err != nil {
		return tid
	}
	return pid
}

// memory returns n bytes of a thread's memory, or fewer if the mapped memory ends before.
func memory(tid int, address uint64, n int) []byte {
	buf := make([]byte, n)
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(n)
	read, err := unix.ProcessVMReadv(tid, local,
		[]unix.RemoteIovec{{Base: uintptr(address), Len: n}}, 0)
	if err != nil {
		// Read only to the end of the page, because the next page is perhaps not mapped.
		const page = 4096
		rest := page - int(address%page)
		if rest >= n {
			return nil
		}
		return memory(tid, address, rest)
	}
	return buf[:read]
}

func text(tid int, address uint64) string {
	return unix.ByteSliceToString(memory(tid, address, unix.PathMax))
}
