// Package machine runs the instances of a simulated rack as virtual machines with QEMU.
//
// A [Host] starts a [Machine] for an instance, plugs disks into it and unplugs them while it runs,
// and finds the machines again that an earlier process started. A machine is of the kind that the
// rack's hypervisor builds: an i440FX with one PCI bus, on which each disk is an NVMe controller
// that is plugged and ejected by ACPI. A [Host] can also build a Q35 with PCIe root ports, which no
// rack does. A machine's first disk is a root filesystem of its own over the
// image that tools/vm-image makes, and survives a stop. A machine's network is QEMU's own: its sshd
// is a port of loopback, and nothing else is reachable from outside.
//
// The directory of a machine has
//
//	root.qcow2   what the guest has written to its root filesystem
//	image        a link to the image below it
//	keys         those that root accepts
//	lock         locked by QEMU as long as it lives
//	console.log  the text of its serial console since its last start
//	qmp.sock     the socket by which QEMU is asked; who answers there with the instance's ID is the
//	             machine
//	qemu.log     what QEMU says about itself
//
// Of a rack's machine, QEMU has not: a serial number that is padded with NULs (it has spaces), an
// empty model, CMIC, and a read-only namespace (its writes fail, but it does not say so before).
package machine

import (
	"errors"
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
