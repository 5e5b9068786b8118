// Package machine runs the instances of a simulated rack as virtual machines with QEMU.
//
// A [Host] starts a [Machine] for an instance, and finds the machines that an earlier process
// started. Disks can be plugged into a running machine and unplugged. A machine is like those of
// the rack's hypervisor: an i440FX with one PCI bus, on which each disk is an NVMe controller that
// ACPI plugs and ejects. A [Host] can also build a Q35 with PCIe root ports, which no rack has. A
// machine's root disk is an overlay of the image that tools/vm-image makes. What the guest writes
// there survives a stop. QEMU's user network forwards a port of 127.0.0.1 to the machine's sshd.
// Nothing else in the machine can be reached from outside.
//
// The directory of a machine has
//
//	root.qcow2   what the guest has written to its root filesystem
//	image        a link to the image on which root.qcow2 is based
//	keys         the SSH keys that root accepts
//	lock         a file that QEMU keeps locked until it ends
//	console.log  the text of the serial console since the last start, at least the last MiB
//	qmp.sock     the socket of QEMU's monitor, by which a machine is found: a process that answers
//	             there with the instance's ID is the machine
//	qemu.log     QEMU's error output
//
// QEMU lacks some things that a rack's machine has: a serial number padded with NULs (QEMU uses
// spaces), an empty model, CMIC, and a read-only NVMe namespace (QEMU only fails the writes).
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

// ErrGone means that the machine's QEMU process has ended.
var ErrGone = errors.New("its QEMU has ended")

// plugTime limits how long QEMU may take for a change that does not depend on the guest.
const plugTime = 10 * time.Second

// Disk is a disk of the rack in a machine.
type Disk struct {
	// ID is unique on the host. Serial has at most 20 bytes.
	ID, Serial, Path string
	SizeBytes        int64
	BlockSize        int
	ReadOnly         bool
}

// Guest has the parameters of a machine.
type Guest struct {
	// ID is the ID of the instance, which the firmware reports. Name is the host name.
	ID, Name    string
	CPUs        int
	MemoryBytes int64
	// Keys are additional lines for root's authorized_keys.
	Keys []string
}

// monitor is a connection to the monitor (QMP) of a QEMU process. It ends with the process.
type monitor struct {
	conn  net.Conn
	ended chan struct{}

	mu sync.Mutex
	// mu guards the fields below.
	next    int
	waiting map[int]chan answer
	watches map[chan event]bool
	// last is the reason that QEMU gave for its shutdown, or "".
	last string
}

type answer struct {
	ID     int
	Return json.RawMessage
	Error  *struct{ Class, Desc string }

	// Only events have these fields.
	Event string
	Data  event
}

type event struct {
	name           string
	Device, Reason string
	Guest          bool
}

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
				default: // drop the event: the channel is full
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
