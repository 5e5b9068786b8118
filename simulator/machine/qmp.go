// Package machine runs the instances of a simulated rack as virtual machines with QEMU.
//
// A [Host] starts a [Machine] for an instance, plugs disks into it and unplugs them while it runs,
// and finds the machines again that an earlier process started. A machine is of the kind that the
// rack's hypervisor builds: an i440FX with one PCI bus, on which each disk is an NVMe controller
// that is plugged and ejected by ACPI. A [Host] can also build a Q35 with PCIe root ports, which no
// rack does. A machine also has a root disk of its own, over the image that tools/vm-image makes,
// which survives a stop. A machine's network is QEMU's own: its sshd is a port of loopback, and
// nothing else is reachable from outside.
//
// The directory of a machine has
//
//	root.qcow2   what the guest has written to its root filesystem
//	image        a link to the image below it
//	keys         those that root accepts
//	lock         locked by QEMU as long as it lives
//	console.log  the text of its serial console since its last start, at least the last MiB
//	qmp.sock     the socket by which QEMU is asked; who answers there with the instance's ID is the
//	             machine
//	qemu.log     what QEMU says about itself
//
// Of a rack's machine, QEMU has not: a serial number that is padded with NULs (it has spaces), an
// empty model, CMIC, and a read-only namespace (its writes fail, but it does not say so before).
package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// ErrGone means that the QEMU of a machine has ended.
var ErrGone = errors.New("its QEMU has ended")

// plugTime is how long QEMU may take for a change that needs no guest.
const plugTime = 10 * time.Second

// Disk is a disk of a machine.
type Disk struct {
	// ID is unique on the host. Serial has at most 20 bytes.
	ID, Serial, Path string
	SizeBytes        int64
	BlockSize        int
	ReadOnly         bool
}

// Guest is what a machine is started with.
type Guest struct {
	// ID is the instance's, which the firmware reports. Name is the hostname.
	ID, Name    string
	CPUs        int
	MemoryBytes int64
	// Keys are lines for root's authorized_keys.
	Keys []string
}

// monitor is a connection to the monitor of a QEMU process (QMP). It ends with the process.
type monitor struct {
	conn  net.Conn
	ended chan struct{}

	mu sync.Mutex
	// guarded by mu
	next    int
	waiting map[int]chan answer
	watches map[chan event]bool
	// last is why QEMU said it shut down, "" if it did not say so.
	last string
}

type answer struct {
	ID     int
	Return json.RawMessage
	Error  *struct{ Class, Desc string }

	// An event has these.
	Event string
	Data  event
}

type event struct {
	name           string
	Device, Reason string
	Guest          bool
}

// connect greets the monitor behind a connection.
func connect(ctx context.Context, conn net.Conn) (*monitor, error) {
	m := &monitor{conn: conn, ended: make(chan struct{}), waiting: map[int]chan answer{},
		watches: map[chan event]bool{}}
	go m.read()
	if err := m.do(ctx, "qmp_capabilities", nil, nil); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return m, nil
}

// read passes on what QEMU says until it ends.
func (m *monitor) read() {
	lines := bufio.NewScanner(m.conn)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var a answer
		if json.Unmarshal(lines.Bytes(), &a) != nil {
			continue
		}
		m.mu.Lock()
		if a.Event != "" {
			a.Data.name = a.Event
			if a.Event == "SHUTDOWN" {
				m.last = a.Data.Reason
			}
			for w := range m.watches {
				select {
				case w <- a.Data:
				default: // nobody watches that many
				}
			}
		} else if w := m.waiting[a.ID]; w != nil {
			w <- a
			delete(m.waiting, a.ID)
		}
		m.mu.Unlock()
	}
	_ = m.conn.Close()
	close(m.ended)
}

// do asks for a command, and decodes what it returns unless result is nil.
func (m *monitor) do(ctx context.Context, command string, arguments, result any) error {
	got := make(chan answer, 1)
	m.mu.Lock()
	m.next++
	id := m.next
	m.waiting[id] = got
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		ID        int    `json:"id"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, id, arguments})
	if err == nil {
		err = m.conn.SetWriteDeadline(time.Now().Add(plugTime))
	}
	if err == nil {
		_, err = m.conn.Write(append(b, '\n'))
	}
	m.mu.Unlock()
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.Join(err, ErrGone)
	}
	if err != nil {
		return fmt.Errorf("ask QEMU for %s: %w", command, err)
	}
	select {
	case <-ctx.Done():
		return fmt.Errorf("QEMU does not answer to %s: %w", command, context.Cause(ctx))
	case <-m.ended:
		return fmt.Errorf("ask QEMU for %s: %w", command, ErrGone)
	case a := <-got:
		if a.Error != nil {
			return fmt.Errorf("QEMU refuses %s: %s: %s", command, a.Error.Class, a.Error.Desc)
		}
		if result == nil {
			return nil
		}
		if err := json.Unmarshal(a.Return, result); err != nil {
			return fmt.Errorf("read QEMU's answer to %s: %w", command, err)
		}
		return nil
	}
}

// watch returns the events from now on, until stop is called.
func (m *monitor) watch() (events <-chan event, stop func()) {
	w := make(chan event, 64)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watches[w] = true
	return w, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.watches, w)
	}
}
