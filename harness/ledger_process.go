package harness

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, 0, err
	}
	sockets, err := socketsOf(pid)
	if err != nil {
		return nil, 0, err
	}
	for _, entry := range entries {
		target, err := os.Readlink(filepath.Join(dir, entry.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed since the directory was read
		}
		if err != nil {
			return nil, 0, err
		}
		socket, known := sockets[target]
		switch {
		case known && socket.remote.Port() != 0 &&
			(socket.local.Port() == port || socket.remote.Port() == port):
			connections++
		case known && socket.remote.Port() != 0 && socket.local.Port() == console:
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

// socket is an entry of the kernel's table of sockets. A listening socket has no remote port.
type socket struct {
	name          string
	local, remote netip.AddrPort
}

// socketsOf reads the network tables of the namespace of a process. The keys are the names
// that the sockets have in /proc/PID/fd.
func socketsOf(pid int) (map[string]socket, error) {
	sockets := map[string]socket{}
	for table, parse := range map[string]func([]string) (string, socket, error){
		"tcp": tcpSocket, "tcp6": tcpSocket, "unix": unixSocket,
	} {
		data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "net", table))
		if errors.Is(err, fs.ErrNotExist) && table == "tcp6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(data) {
			fields := strings.Fields(string(line))
			if len(fields) < 7 || !strings.Contains(fields[0], ":") {
				continue // the header
			}
			inode, socket, err := parse(fields)
			if err != nil {
				return nil, fmt.Errorf("/proc/%d/net/%s: %w: %q", pid, table, err, line)
			}
			sockets["socket:["+inode+"]"] = socket
		}
	}
	return sockets, nil
}

// tcpSocket parses a line of /proc/net/tcp: the second and third columns are the local and the
// remote address, the tenth column is the inode.
func tcpSocket(fields []string) (inode string, s socket, err error) {
	if len(fields) < 10 {
		return "", s, errors.New("fewer than ten columns")
	}
	local, errLocal := kernelAddress(fields[1])
	remote, errRemote := kernelAddress(fields[2])
	name := fmt.Sprintf("connection %s to %s", local, remote)
	if remote.Port() == 0 {
		name = fmt.Sprintf("listener at %s", local)
	}
	return fields[9], socket{name: name, local: local, remote: remote},
		errors.Join(errLocal, errRemote)
}

// unixSocket parses a line of /proc/net/unix: the seventh column is the inode, the eighth
// column, if it exists, is the path.
func unixSocket(fields []string) (inode string, s socket, err error) {
	name := "unix socket"
	if len(fields) > 7 {
		name += " " + fields[7]
	}
	return fields[6], socket{name: name}, nil
}

// kernelAddress parses an address in the format of /proc/net/tcp: hexadecimal words in the
// machine's byte order, a colon, the port.
func kernelAddress(text string) (netip.AddrPort, error) {
	hexIP, hexPort, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(hexPort, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	raw, err := hex.DecodeString(hexIP)
	if err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("no address: %q", text)
	}
	for word := range slices.Chunk(raw, 4) {
		binary.NativeEndian.PutUint32(word, binary.BigEndian.Uint32(word))
	}
	ip, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("no address: %q", text)
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(port)), nil
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
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	var left []string
	for _, file := range stats {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it ended since the directory was read
		}
		name, group, state := processStat(string(data))
		if groups[group] && state != "Z" {
			left = append(left, name+" "+filepath.Base(filepath.Dir(file)))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("%s left running: %s", leader, strings.Join(left, ", "))
	}
	return nil
}

// processStat parses name, process group and state from a line of /proc/PID/stat. The name is
// in parentheses and may contain any character, parentheses too.
func processStat(line string) (name string, group int, state string) {
	open, end := strings.Index(line, "("), strings.LastIndex(line, ")")
	if open < 0 || end < open {
		return "", 0, ""
	}
	// The fields after the name are state, parent and process group.
	fields := strings.Fields(line[end+1:])
	if len(fields) < 3 {
		return "", 0, ""
	}
	group, _ = strconv.Atoi(fields[2])
	return line[open+1 : end], group, fields[0]
}
