//go:build linux

package trace

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// options make the kernel trace every thread and program that the traced process starts, and mark
// the stops at system calls.
const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK |
	unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACEEXEC

// syscallStop is the signal of a stop at a system call.
const syscallStop = unix.SIGTRAP | 0x80

func ptrace(request, tid int, addr, data uintptr) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func seize(tid int) error { return ptrace(unix.PTRACE_SEIZE, tid, 0, options) }

func interrupt(tid int) error { return ptrace(unix.PTRACE_INTERRUPT, tid, 0, 0) }

// resume makes a stopped thread run until it enters or leaves its next system call.
func resume(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_SYSCALL, tid, 0, uintptr(sig))
}

func detach(tid int, sig unix.Signal) error {
	return ptrace(unix.PTRACE_DETACH, tid, 0, uintptr(sig))
}

// syscallInfo is struct ptrace_syscall_info (linux/ptrace.h). It is the same on every
// architecture.
type syscallInfo struct {
	op   uint8
	_    [3]uint8
	arch uint32
	ip   uint64
	sp   uint64
	// At the entry, the words are the number and the arguments of the call. At the exit, they are its
	// result and a flag that marks an error.
	words [8]uint64
}

func (i syscallInfo) entry() bool        { return i.op == unix.PTRACE_SYSCALL_INFO_ENTRY }
func (i syscallInfo) exit() bool         { return i.op == unix.PTRACE_SYSCALL_INFO_EXIT }
func (i syscallInfo) number() uint64     { return i.words[0] }
func (i syscallInfo) result() int64      { return int64(i.words[0]) }
func (i syscallInfo) arg(n int) uint64   { return i.words[1+n] }
func (i syscallInfo) descriptor() int    { return int(int32(i.arg(0))) }
func (i syscallInfo) directory() int     { return int(int32(i.arg(0))) }
func (i syscallInfo) flags(n int) uint64 { return i.arg(n) & 0xffffffff }

// syscallOf returns the system call at which a thread is stopped.
func syscallOf(tid int) (info syscallInfo, err error) {
	err = ptrace(unix.PTRACE_GET_SYSCALL_INFO, tid, unsafe.Sizeof(info),
		uintptr(unsafe.Pointer(&info)))
	return info, err
}

// threads lists the threads of a process.
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

// processOf returns the process of a thread.
func processOf(tid int) int {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return tid
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if pid, err := strconv.Atoi(strings.TrimSpace(rest)); err == nil {
				return pid
			}
		}
	}
	return tid
}

// memory reads up to n bytes of a thread's memory. It returns fewer if the mapped memory ends.
func memory(tid int, address uint64, n int) []byte {
	buf := make([]byte, n)
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(n)
	read, err := unix.ProcessVMReadv(tid, local,
		[]unix.RemoteIovec{{Base: uintptr(address), Len: n}}, 0)
	if err != nil {
		// Some of the memory may not be mapped. The part up to the next page is.
		const page = 4096
		rest := page - int(address%page)
		if rest >= n {
			return nil
		}
		return memory(tid, address, rest)
	}
	return buf[:read]
}

// text reads a string that ends with a NUL.
func text(tid int, address uint64) string {
	return unix.ByteSliceToString(memory(tid, address, unix.PathMax))
}
