//go:build linux

package trace

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// socketKind is the kind of a socket: of a client of the rack, of the rack's server, a Unix socket,
// or another one.
type socketKind int

const (
	other socketKind = iota
	rackClient
	rackServer
	local
)

// socket returns the kind of a socket by its name in /proc/PID/fd. It keeps the result: during a
// session the kernel hardly gives the same number to another socket.
func (s *tracing) socket(link string) socketKind {
	kind, known := s.sockets[link]
	if !known {
		inode := strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")
		kind = s.socketKind(inode)
		s.sockets[link] = kind
	}
	return kind
}

func (s *tracing) socketKind(inode string) socketKind {
	for _, table := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", s.order.PID, table))
		if err != nil {
			continue
		}
		for line := range bytes.Lines(data) {
			fields := strings.Fields(string(line))
			if len(fields) < 10 || fields[9] != inode {
				continue
			}
			switch s.order.Rack {
			case portOf(fields[2]):
				return rackClient
			case portOf(fields[1]):
				return rackServer
			}
			return other
		}
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", s.order.PID))
	if err != nil {
		return other
	}
	for line := range bytes.Lines(data) {
		if fields := strings.Fields(string(line)); len(fields) > 6 && fields[6] == inode {
			return local
		}
	}
	return other
}

// portOf parses the port of an address in the format of /proc/net/tcp.
func portOf(address string) uint16 {
	_, port, _ := strings.Cut(address, ":")
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return 0
	}
	return uint16(n)
}
