package harness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
)

// idleConnections is the number of connections to the rack that a driver may keep for its next
// calls.
const idleConnections = 32

// watchedProcess is a process whose files and goroutines are counted. Connections between
// driver and rack are counted separately, and without their goroutines, because a small number of
// them is no leak.
type watchedProcess struct {
	name string
	proc *process
	port uint16
	// console is the port whose connections are not counted: browsers that show a simulator's console
	// come and go. It is 0 for a process without one.
	console uint16
	// peers is the number of processes that connect to this one, or to which it connects.
	peers int
	// goroutines returns the goroutine profile of the process, as text.
	goroutines func(context.Context) ([]byte, error)
}

func (s watchedProcess) add(ctx context.Context, ledger Ledger) error {
	profile, err := s.goroutines(ctx)
	if err != nil {
		return fmt.Errorf("read the goroutines of %s: %w", s.name, err)
	}
	routines, err := goroutinesIn(string(profile))
	if err != nil {
		return fmt.Errorf("list the goroutines of %s: %w", s.name, err)
	}
	files, connections, err := openFiles(s.proc.pid(), s.port, s.console)
	if err != nil {
		return fmt.Errorf("list the open files of %s: %w", s.name, err)
	}
	ledger.add(s.goroutineEntry(), routines...)
	ledger.add("open file of "+s.name+":", files...)
	if connections > idleConnections*s.peers {
		ledger["connection between driver and rack, of "+s.name] = connections
	}
	return nil
}

func (s watchedProcess) goroutineEntry() string { return "goroutine of " + s.name + ":" }

// openFiles lists the open files of a process. It counts connections between driver and rack
// separately, and those to the console not at all.
func openFiles(pid int, port, console uint16) (names []string, connections int, err error) {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return nil, 0, err
	}
	targets, err := process.FileDescriptorTargets()
	if err != nil {
		return nil, 0, err
	}
	sockets, err := socketsOf(pid)
	if err != nil {
		return nil, 0, err
	}
	after, err := process.FileDescriptorTargets()
	if err != nil {
		return nil, 0, err
	}
	for _, target := range targets {
		socket, known := sockets[target]
		switch {
		case target == "", !slices.Contains(after, target): // closed since the directory was read
		case known && socket.remote != 0 && (socket.local == port || socket.remote == port):
			connections++
		case known && socket.remote != 0 && socket.local == console:
		case known:
			names = append(names, socket.name)
		default:
			// The number of a pipe is different each time.
			kind, _, _ := strings.Cut(target, ":[")
			names = append(names, kind)
		}
	}
	return names, connections, nil
}

// socket is an entry of the kernel's table of sockets, with its ports. A listening socket has no
// remote port.
type socket struct {
	name          string
	local, remote uint16
}

// socketsOf reads the network tables of the namespace of a process. The keys are the names
// that the sockets have in /proc/PID/fd.
func socketsOf(pid int) (map[string]socket, error) {
	tables, err := procfs.NewFS(filepath.Join("/proc", strconv.Itoa(pid)))
	if err != nil {
		return nil, err
	}
	tcp, err := tables.NetTCP()    //nolint:staticcheck // netlink asks only its own namespace
	tcp6, err6 := tables.NetTCP6() //nolint:staticcheck // as above
	if errors.Is(err6, fs.ErrNotExist) {
		err6 = nil // a kernel without IPv6
	}
	local, errUnix := tables.NetUNIX()
	if err := errors.Join(err, err6, errUnix); err != nil {
		return nil, err
	}
	sockets := map[string]socket{}
	for _, t := range slices.Concat(tcp, tcp6) {
		name := fmt.Sprintf("connection %s to %s", address(t.LocalAddr, t.LocalPort),
			address(t.RemAddr, t.RemPort))
		if t.RemPort == 0 {
			name = "listener at " + address(t.LocalAddr, t.LocalPort)
		}
		sockets[fmt.Sprintf("socket:[%d]", t.Inode)] = socket{name, uint16(t.LocalPort),
			uint16(t.RemPort)}
	}
	for _, u := range local.Rows {
		sockets[fmt.Sprintf("socket:[%d]", u.Inode)] = socket{
			name: strings.TrimSpace("unix socket " + u.Path)}
	}
	return sockets, nil
}

func address(ip net.IP, port uint64) string {
	return net.JoinHostPort(ip.String(), strconv.FormatUint(port, 10))
}

// netPort returns the port of a URL. The URLs come from the simulator and always have a port.
func netPort(address string) uint16 {
	u, err := url.Parse(address)
	if err != nil {
		return 0
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		return 0
	}
	return uint16(port)
}

// goroutinesIn parses a goroutine profile: a header, then for each stack the number of
// goroutines that have it, its frames from the innermost to the outermost, and a blank line.
func goroutinesIn(profile string) ([]string, error) {
	heading, stacks, _ := strings.Cut(profile, "\n")
	if !strings.HasPrefix(heading, "goroutine profile:") {
		return nil, fmt.Errorf("no goroutine profile: %q", heading)
	}
	var list []string
	for stack := range strings.SplitSeq(strings.TrimSpace(stacks), "\n\n") {
		number, _, _ := strings.Cut(stack, " ")
		count, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("no count before a stack: %q", stack)
		}
		if name := purpose(stack); name != "" && !ofPool(name) {
			list = append(list, slices.Repeat([]string{name}, count)...)
		}
	}
	return list, nil
}

// purpose returns the function with which a goroutine was started. If that was a function of
// WaitGroup or errgroup, purpose returns the function that they run. It returns "" for a
// goroutine that has not run yet.
func purpose(stack string) string {
	lines := strings.Split(strings.TrimSpace(stack), "\n")
	for _, line := range slices.Backward(lines[1:]) {
		// "#", address, function+offset, file
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		name, _, _ := strings.Cut(fields[2], "+0x")
		if !strings.HasPrefix(name, "sync.(*WaitGroup).Go") &&
			!strings.HasPrefix(name, "golang.org/x/sync/errgroup.") {
			return name
		}
	}
	return ""
}

// ofPool reports whether a goroutine belongs to an HTTP connection, which is counted as an
// open file, or is one of the at most 16 goroutines that read the requests to a FUSE
// filesystem.
func ofPool(name string) bool {
	for _, prefix := range []string{"net/http.(*conn).serve", "net/http.(*connReader).",
		"net/http.(*persistConn).", "net/http.(*http2", "net/http/internal/http2.",
		"github.com/hanwen/go-fuse/v2/fuse.(*Server).loop"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// noneLeft returns an error if a process of this one's group still runs. A mkfs or a mount
// that outlives the driver would continue to write to a disk.
func (p *process) noneLeft() error { return NoneLeft(p.name, map[int]bool{p.pid(): true}) }

// NoneLeft returns an error if a process of one of the groups still runs.
func NoneLeft(leader string, groups map[int]bool) error {
	all, err := procfs.AllProcs()
	if err != nil {
		return err
	}
	var left []string
	for _, p := range all {
		stat, err := p.Stat()
		if err == nil && groups[stat.PGRP] && stat.State != "Z" { // an error: it has ended meanwhile
			left = append(left, fmt.Sprint(stat.Comm, " ", p.PID))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("%s left running: %s", leader, strings.Join(left, ", "))
	}
	return nil
}
