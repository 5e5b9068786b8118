package rules

import (
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// serialBytes is the number of bytes of a disk's name that a guest sees.
const serialBytes = 20

// SerialOf returns the serial of a disk's device.
func SerialOf(name oxide.Name) string {
	return string(name)[:min(len(name), serialBytes)]
}

func checkSerials(c *Check) {
	for _, disk := range c.disksHere() {
		c.device(SerialOf(disk.Name))
	}
	if !c.Hotplug {
		return // only its owner can attach two such disks
	}
	stem := string(c.Name())
	stem += strings.Repeat("x", serialBytes-len(stem))
	first := c.plug(oxide.Name(stem + "-first"))
	shown := c.device(SerialOf(first.Name))
	c.plug(oxide.Name(stem + "-second"))
	// The disk that is attached after the twin appears after it. So when it has appeared, the twin
	// cannot appear any more.
	c.device(SerialOf(c.plug(c.Name() + "-with-a-longer-name").Name))
	var names []string
	for _, d := range c.devices() {
		if d.serial == stem {
			names = append(names, d.name)
		}
	}
	if !slices.Equal(names, []string{shown.name}) {
		c.Errorf("devices of two disks with the serial %s: expected the first one's, %s; found %s",
			stem, shown.name, strings.Join(names, ", "))
	}
}

func checkFirmware(c *Check) {
	c.needGuest()
	for field, want := range map[string]string{"sys_vendor": "Oxide", "product_name": "OxVM",
		"product_serial": c.Here.ID, "product_uuid": c.Here.ID} {
		text, err := fs.ReadFile(c.Here.Sys, "class/dmi/id/"+field)
		if errors.Is(err, fs.ErrPermission) {
			c.Errorf("read %s of the firmware: only root may; run this as root", field)
			continue
		}
		c.must("read "+field+" of the firmware", err)
		got := strings.Trim(string(text), "\x00 \n")
		Equal(c, field+" of the firmware", strings.ToLower(got), strings.ToLower(want))
	}
	Equal(c, "the ID of the instance", c.See(c.Here.ID).Id, c.Here.ID)
}

// qemuModel is the model of QEMU's NVMe controllers, which pad it and their serials with spaces.
const qemuModel = "QEMU NVMe Ctrl"

func checkPadding(c *Check) {
	for _, disk := range c.disksHere() {
		d := c.device(SerialOf(disk.Name))
		model, err := fs.ReadFile(c.Here.Sys, "block/"+d.name+"/device/model")
		c.must("read the model of "+d.name, err)
		if strings.HasPrefix(string(model), qemuModel) {
			c.NotTested("the controller of %s is QEMU's, which no rack has: this instance is a virtual "+
				"machine of a simulated rack", d.name)
		}
		padding := strings.TrimPrefix(d.raw, SerialOf(disk.Name))
		if strings.Trim(padding, "\x00") != "" {
			c.Errorf("the serial of %s: expected nothing but NULs behind the disk's name; found %q",
				d.name, d.raw)
		}
		if strings.Trim(string(model), "\x00\n") != "" {
			c.Errorf("the model of %s: expected nothing but NULs; found %q", d.name, model)
		}
	}
}

func checkDeviceNumbers(c *Check) {
	c.needGuest()
	if !c.Hotplug {
		c.Blocked("disks come and go while an instance runs only with hot-plug")
	}
	disks := []*oxide.Disk{c.plug(c.Name()), c.plug(c.Name()), c.plug(c.Name())}
	before := map[string]device{}
	for _, disk := range disks {
		before[disk.Id] = c.device(SerialOf(disk.Name))
	}
	kept := func(when string) {
		for _, disk := range []*oxide.Disk{disks[0], disks[2]} {
			d := c.device(SerialOf(disk.Name))
			Equal(c, "the device of a disk "+when, d.name, before[disk.Id].name)
			Equal(c, "its number", d.number, before[disk.Id].number)
			Equal(c, "the count of its appearances", d.sequence, before[disk.Id].sequence)
		}
	}
	Must[*oxide.Disk](c, "detach one of three disks")(c.Detach(disks[1].Id, c.Here.ID))
	c.noDevice(SerialOf(disks[1].Name))
	kept("after another one was detached")
	Must[*oxide.Disk](c, "attach it again")(c.Attach(disks[1].Id, c.Here.ID))
	c.device(SerialOf(disks[1].Name))
	kept("after another one was attached")
}

func checkWriteCache(c *Check) {
	distributed := slices.DeleteFunc(c.disksHere(), func(d oxide.Disk) bool {
		return d.DiskType != oxide.DiskTypeDistributed
	})
	if len(distributed) == 0 {
		c.NotTested("the instance %s has no distributed disk", c.Here.ID)
	}
	for _, disk := range distributed {
		d := c.device(SerialOf(disk.Name))
		text, err := fs.ReadFile(c.Here.Sys, "block/"+d.name+"/queue/write_cache")
		if errors.Is(err, fs.ErrNotExist) {
			c.NotTested("this instance does not show whether %s has a write cache, or the device is gone",
				d.name)
		}
		c.must("read the write cache of "+d.name, err)
		Equal(c, "the write cache of "+d.name, strings.TrimSpace(string(text)), "write back")
	}
}
