package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/prometheus/procfs"
)

// settleTimeout is the time in which connections have to close and goroutines have to end.
const settleTimeout = 15 * time.Second

// Ledger counts objects by name: the rack's disks, snapshots, images and attachments, the kernel's
// loop devices and mounts, and the processes' open files and goroutines. An object has leaked if
// its count is higher at the end of a test than at the start.
type Ledger map[string]int

// More returns the objects that l counts more often than start. It adds both counts to the text of
// an object, unless start counts 0 and l counts 1.
func (l Ledger) More(start Ledger) []string {
	var more []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		switch surplus := l[name] - start[name]; {
		case surplus <= 0:
		case start[name] == 0 && surplus == 1:
			more = append(more, name)
		default:
			more = append(more, fmt.Sprintf("%s (%d at the start, %d now)",
				name, start[name], l[name]))
		}
	}
	return more
}

func (l Ledger) add(kind string, names ...string) {
	for _, name := range names {
		l[kind+" "+name]++
	}
}

// Ledger counts the rack's objects, the loop devices and mounts in the rack's directory, and the
// open files and goroutines of the simulator and the plugins.
func (r *Rack) Ledger(ctx context.Context, plugins ...*Plugin) (ledger Ledger, err error) {
	defer Catch(&err)
	ledger, state := Got(KernelLedger(r.Dir)), Got(r.Admin.State(ctx))
	addEach(ledger, "disk", state.Disks)
	addEach(ledger, "snapshot", state.Snapshots)
	addEach(ledger, "image", state.Images)
	addEach(ledger, "attachment", state.Attachments)
	for _, s := range r.watched(plugins) {
		s.add(ctx, ledger)
	}
	return ledger, nil
}

func (r *Rack) watched(plugins []*Plugin) []watchedProcess {
	all := []watchedProcess{{name: "the simulator", proc: r.process, port: r.Port(),
		peers: max(1, len(plugins)), console: netPort(r.Admin.URL), goroutines: r.Admin.Goroutines}}
	for _, p := range plugins {
		all = append(all, watchedProcess{name: "the driver in mode " + p.options.Mode, proc: p.process,
			port: r.Port(), peers: 1, goroutines: p.GoroutineProfile})
	}
	return all
}

// Balance waits until a new ledger has no more objects than start. After settleTimeout it returns
// an error that names the leaked objects. If goroutines of a process have leaked, Balance ends the
// process with SIGQUIT, which makes the process write all stacks to its log.
func (r *Rack) Balance(ctx context.Context, start Ledger, plugins ...*Plugin) error {
	err := Await(ctx, settleTimeout, func() error { return r.compare(ctx, start, plugins...) })
	if err == nil {
		return nil
	}
	for _, s := range r.watched(plugins) {
		if strings.Contains(err.Error(), s.goroutineEntry()) {
			s.proc.quit()
			err = fmt.Errorf("%w\nthe stacks of %s are at the end of %s", err, s.name, s.proc.log)
		}
	}
	return err
}

func (r *Rack) compare(ctx context.Context, start Ledger, plugins ...*Plugin) error {
	now, err := r.Ledger(ctx, plugins...)
	if more := now.More(start); err == nil && len(more) > 0 {
		err = fmt.Errorf("more than at the start:\n  %s", strings.Join(more, "\n  "))
	}
	return err
}

func addEach[T any](ledger Ledger, kind string, entries []T) {
	for _, entry := range entries {
		ledger.add(kind, string(Got(json.Marshal(entry))))
	}
}

// KernelLedger counts the mounts below a directory, and the loop devices on files below it.
func KernelLedger(dir string) (ledger Ledger, err error) {
	defer Catch(&err)
	ledger = Ledger{}
	for _, file := range Got(filepath.Glob("/sys/block/loop*/loop/backing_file")) {
		backing, _ := os.ReadFile(file) // the device may have been detached since Glob
		if name := strings.TrimSpace(string(backing)); strings.HasPrefix(name, dir+"/") {
			// Omit the device's name: a restarted simulator may use another device for a file.
			ledger.add("loop device on", name)
		}
	}
	ledger.add("mount", Got(MountsBelow(dir))...)
	return ledger, nil
}

// MountsBelow returns the mounts below a directory in this mount namespace.
func MountsBelow(dir string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	var mounts []string
	for _, info := range infos {
		mounts = append(mounts,
			fmt.Sprintf("%s of %s (%s)", info.Mountpoint, info.Source, info.FSType))
	}
	return mounts, Wrap(err, "read the mount table")
}

func (r *Rack) nothingLeft() error {
	ledger, err := KernelLedger(r.Dir)
	err = errors.Join(err, r.noneLeft())
	if left := ledger.More(nil); len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left after the rack was stopped:\n  %s",
			strings.Join(left, "\n  ")))
	}
	return err
}

// idleConnections is the number of open connections that a driver keeps for later requests.
const idleConnections = 32

// watchedProcess is a process whose open files and goroutines a ledger counts. The ledger omits
// connections up to idleConnections per peer, and all goroutines of connections.
type watchedProcess struct {
	name string
	proc *process
	port uint16
	// console is the port of the web console, or 0. A ledger omits browsers' connections to this port.
	console uint16
	// peers is the number of processes that have connections to this process.
	peers      int
	goroutines func(context.Context) ([]byte, error)
}

// add adds the process's open files and goroutines to a ledger. It panics on an error, like Must.
func (s watchedProcess) add(ctx context.Context, ledger Ledger) {
	profile, err := s.goroutines(ctx)
	Must(Wrap(err, "read the goroutines of %s", s.name))
	routines, err := goroutinesIn(string(profile))
	Must(Wrap(err, "list the goroutines of %s", s.name))
	files, connections, err := openFiles(s.proc.PID(), s.port, s.console)
	Must(Wrap(err, "list the open files of %s", s.name))
	ledger.add(s.goroutineEntry(), routines...)
	ledger.add("open file of "+s.name+":", files...)
	if connections > idleConnections*s.peers {
		ledger["connection between driver and rack, of "+s.name] = connections
	}
}

func (s watchedProcess) goroutineEntry() string { return "goroutine of " + s.name + ":" }

func openFiles(pid int, port, console uint16) (names []string, connections int, err error) {
	defer Catch(&err)
	process := Got(procfs.NewProc(pid))
	targets := Got(process.FileDescriptorTargets())
	sockets := socketsOf(pid)
	after := Got(process.FileDescriptorTargets())
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
			// Omit the number of a pipe, because it differs in each process.
			kind, _, _ := strings.Cut(target, ":[")
			names = append(names, kind)
		}
	}
	return names, connections, nil
}

// socket is a socket of a process. local and remote are TCP ports. A listener's remote is 0.
type socket struct {
	name          string
	local, remote uint16
}

// socketsOf maps link targets in /proc/PID/fd to sockets. It panics on an error, like Must.
func socketsOf(pid int) map[string]socket {
	tables := Got(procfs.NewFS(fmt.Sprint("/proc/", pid)))
	tcp, err := tables.NetTCP()    //nolint:staticcheck // netlink shows only the caller's namespace
	tcp6, err6 := tables.NetTCP6() //nolint:staticcheck // as above
	if errors.Is(err6, fs.ErrNotExist) {
		err6 = nil // a kernel without IPv6
	}
	local, errUnix := tables.NetUNIX()
	Must(errors.Join(err, err6, errUnix))
	sockets := map[string]socket{}
	for _, t := range slices.Concat(tcp, tcp6) {
		name := fmt.Sprintf("connection %s to %s", address(t.LocalAddr, t.LocalPort),
			address(t.RemAddr, t.RemPort))
		if t.RemPort == 0 {
			name = "listener at " + address(t.LocalAddr, t.LocalPort)
		}
		id := fmt.Sprintf("socket:[%d]", t.Inode)
		sockets[id] = socket{name, uint16(t.LocalPort), uint16(t.RemPort)}
	}
	for _, u := range local.Rows {
		sockets[fmt.Sprintf("socket:[%d]", u.Inode)] = socket{
			name: strings.TrimSpace("unix socket " + u.Path)}
	}
	return sockets
}

func address(ip net.IP, port uint64) string {
	return net.JoinHostPort(ip.String(), strconv.FormatUint(port, 10))
}

func netPort(address string) uint16 {
	port, _ := strconv.ParseUint(address[strings.LastIndex(address, ":")+1:], 10, 16)
	return uint16(port)
}

// goroutinesIn parses a goroutine profile: a header, and then for each stack the number of its
// goroutines, its frames from the innermost outwards, and a blank line.
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

// purpose returns the function that a goroutine runs. For a goroutine of a WaitGroup or an
// errgroup, this is the function that was passed to Go, or "" if that has not begun yet.
func purpose(stack string) string {
	lines := strings.Split(strings.TrimSpace(stack), "\n")
	for _, line := range slices.Backward(lines[1:]) {
		// The fields are "#", the address, function+offset, and the file.
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

// ofPool reports whether a ledger omits goroutines that run the named function. Such a goroutine
// either serves an HTTP connection, which openFiles counts, or reads requests for go-fuse.
func ofPool(name string) bool {
	return slices.ContainsFunc([]string{"net/http.(*conn).serve", "net/http.(*connReader).",
		"net/http.(*persistConn).", "net/http.(*http2", "net/http/internal/http2.",
		"github.com/hanwen/go-fuse/v2/fuse.(*Server).loop"},
		func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// noneLeft returns an error if a process of p's process group still runs. A mkfs or mount that
// still runs after the driver has ended could write to a disk.
func (p *process) noneLeft() error { return NoneLeft(p.name, map[int]bool{p.PID(): true}) }

// NoneLeft returns an error if a process of one of these process groups still runs.
func NoneLeft(leader string, groups map[int]bool) (err error) {
	defer Catch(&err)
	var left []string
	for _, p := range Got(procfs.AllProcs()) {
		stat, err := p.Stat()
		if err == nil && groups[stat.PGRP] && stat.State != "Z" { // an error means that it has ended
			left = append(left, fmt.Sprint(stat.Comm, " ", p.PID))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("%s left running: %s", leader, strings.Join(left, ", "))
	}
	return nil
}
