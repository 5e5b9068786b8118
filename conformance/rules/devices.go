package rules

import (
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// device is a block device of the guest that has a serial.
type device struct {
	name string
	// raw is the serial as the guest shows it, and serial is the same without padding.
	raw, serial string
	// number is major:minor. sequence grows with every device that appears, and is "" if the guest's
	// kernel does not report it.
	number, sequence string
}

// needGuest ends a check that needs a guest if there is none.
func (c *Check) needGuest() {
	if c.Here == nil {
		c.NotTested("no guest can be seen; run this inside an instance of the project")
	}
}

// disksHere returns disks that the guest shows: with hot-plug a new one, otherwise those that are
// attached to its instance.
func (c *Check) disksHere() []oxide.Disk {
	c.needGuest()
	if c.Hotplug {
		c.plug(c.Name())
	}
	disks := c.DisksOf(c.Here.ID)
	if len(disks) == 0 {
		c.Blocked("the instance %s has no disk to look at, and gains one only with hot-plug", c.Here.ID)
	}
	if !c.Hotplug {
		return disks
	}
	var own []oxide.Disk
	for _, disk := range disks {
		if strings.HasPrefix(string(disk.Name), "conf-"+c.Mark+"-") {
			own = append(own, disk)
		}
	}
	return own
}

// plug creates a disk and attaches it to the guest's instance.
func (c *Check) plug(name oxide.Name) *oxide.Disk {
	create := c.Blank()
	create.Body.Name = name
	disk := Must[*oxide.Disk](c, "create a disk")(c.CreateDisk(create))
	return Must[*oxide.Disk](c, "attach a disk to this instance")(c.Attach(disk.Id, c.Here.ID))
}

// devices lists the guest's devices that have a serial. It may leave out a device that appears or
// disappears in the meantime.
func (c *Check) devices() []device {
	entries, err := fs.ReadDir(c.Here.Sys, "block")
	c.must("list the guest's devices", err)
	var all []device
	for _, entry := range entries {
		name := entry.Name()
		read := func(file string) string {
			text, _ := fs.ReadFile(c.Here.Sys, "block/"+name+"/"+file)
			return strings.TrimSuffix(string(text), "\n")
		}
		// A hidden device is one path to a multipath device.
		raw := read("device/serial")
		if raw == "" || read("hidden") == "1" {
			continue
		}
		all = append(all, device{name: name, raw: raw, serial: strings.Trim(raw, "\x00 "),
			number: read("dev"), sequence: read("diskseq")})
	}
	return all
}

// device waits for the guest's device with a serial, and demands that it is the only one.
func (c *Check) device(serial string) (found device) {
	c.awaitGuest(func() error {
		var with []device
		var others []string
		for _, d := range c.devices() {
			if d.serial == serial {
				with = append(with, d)
			} else {
				others = append(others, d.serial)
			}
		}
		switch len(with) {
		case 0:
			return fmt.Errorf("a guest's device: expected one with the serial %q; found %q", serial, others)
		case 1:
			found = with[0]
			return nil
		}
		c.Fatalf("a guest's device: expected one with the serial %q; found it at %s and at %s", serial,
			with[0].name, with[1].name)
		return nil
	})
	return found
}

// noDevice waits until the guest has no device with a serial.
func (c *Check) noDevice(serial string) {
	c.awaitGuest(func() error {
		for _, d := range c.devices() {
			if d.serial == serial {
				return fmt.Errorf("a guest's device: expected none with the serial %q any more; found %s",
					serial, d.name)
			}
		}
		return nil
	})
}

// deviceTimeout limits how long a guest takes to notice a disk. A simulated guest only writes a
// file.
const (
	deviceTimeout          = time.Minute
	simulatedDeviceTimeout = 5 * time.Second
)

func (c *Check) awaitGuest(ask func() error) {
	timeout := deviceTimeout
	if c.Simulated() {
		switches, err := c.Admin.Switches(c.ctx)
		c.must("read the simulated rack's switches", err)
		timeout = simulatedDeviceTimeout + 2*time.Duration(switches.DeviceDelay)
	}
	if err := harness.Await(c.ctx, timeout, ask); err != nil {
		c.Fatalf("%s", err)
	}
}
