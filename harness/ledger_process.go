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

// idleConnections is how many connections to the rack a driver may keep for its next calls.
const idleConnections = 32

// watchedProcess is a process whose files and goroutines are counted. A connection between driver
// and rack is no leak while they are few; it is counted apart, and without its goroutines.
type watchedProcess struct {
	name string
	proc *process
	port uint16
	// peers is how many processes have connections with it.
	peers int
	// goroutines reads the stacks of its goroutines, as text.
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
	files, connections, err := openFiles(s.proc.pid(), s.port)
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

// openFiles lists what a process has open, and apart from it how many connections between driver
// and rack.
func openFiles(pid int, port uint16) (names []string, connections int, err error) {
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
		case known:
			names = append(names, socket.name)
		default:
			// A pipe's number is another one every time.
			kind, _, _ := strings.Cut(target, ":[")
			names = append(names, kind)
		}
	}
	return names, connections, nil
}

// socket is what the kernel's tables say of one. A listening one has no remote port.
type socket struct {
	name          string
	local, remote netip.AddrPort
}

// socketsOf reads the network tables that a process sees, by what /proc/PID/fd calls a socket.
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
				continue // the heading
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

// tcpSocket reads a line of /proc/net/tcp: its number, local and remote address, and as tenth
// column the inode.
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

// unixSocket reads a line of /proc/net/unix: the seventh column is the inode, the eighth, if there,
// the path.
func unixSocket(fields []string) (inode string, s socket, err error) {
	name := "unix socket"
	if len(fields) > 7 {
		name += " " + fields[7]
	}
	return fields[6], socket{name: name}, nil
}

// kernelAddress reads an address as /proc/net/tcp prints it: hexadecimal words in the machine's
// byte order, a colon, the port.
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

// netPort is the port of a URL; the URLs come from the simulator and always have one.
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

// goroutinesIn reads a profile: a heading, then for each stack how many goroutines have it and its
// frames, the innermost first, and a blank line.
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

// purpose is the function that a goroutine was started with, or that was given to the one it was
// started with. It is empty for one that has not had its first turn.
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

// ofPool reports whether a goroutine comes and goes with an HTTP connection, which is counted as an
// open file, or is one of the at most 16 that read the requests to a FUSE filesystem.
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

// noneLeft demands that no process of this one's group runs any more: a mkfs or a mount that
// outlived the driver would go on writing to a disk.
func (p *process) noneLeft() error {
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
		if group == p.pid() && state != "Z" {
			left = append(left, name+" "+filepath.Base(filepath.Dir(file)))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("%s left running: %s", p.name, strings.Join(left, ", "))
	}
	return nil
}

// processStat reads name, process group and state from a line of /proc/PID/stat. The name stands
// in parentheses and may hold any character, parentheses too.
func processStat(line string) (name string, group int, state string) {
	open, end := strings.Index(line, "("), strings.LastIndex(line, ")")
	if open < 0 || end < open {
		return "", 0, ""
	}
	// After the name: state, parent, process group.
	fields := strings.Fields(line[end+1:])
	if len(fields) < 3 {
		return "", 0, ""
	}
	group, _ = strconv.Atoi(fields[2])
	return line[open+1 : end], group, fields[0]
}
