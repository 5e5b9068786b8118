package simulator

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/google/uuid"
)

type instanceCreate struct {
	name, description, hostname string
	ncpus                       int
	memory                      int64
	boot                        *diskAttachment
	disks                       []diskAttachment
	interfaces                  []interfaceCreate
	start                       bool
	autoRestartPolicy           *string
	cpuPlatform                 *string
	jumboFrames                 bool
	// unsupported names a part of the request that this simulator does not have.
	unsupported string
}

// diskAttachment is a disk that an instance is created with: a new one, or one that is there.
type diskAttachment struct {
	create *diskCreate
	attach string
}

const maxUserData = 32 << 10

var hostnames = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?` +
	`(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*$`)

func parseInstanceCreate(f *fields) any {
	c := instanceCreate{
		hostname: f.text("hostname"), ncpus: f.cpus("ncpus"), memory: f.byteCount("memory"),
		start:       f.flag("start", true),
		jumboFrames: f.flag("enable_jumbo_frames", false),
	}
	c.name, c.description = f.identity()
	if len(c.hostname) > 253 || !hostnames.MatchString(c.hostname) {
		f.fail("hostname", "invalid hostname")
	}
	if f.has("user_data") {
		data, err := base64.StdEncoding.DecodeString(f.text("user_data"))
		if err != nil {
			f.fail("user_data", "invalid value: invalid base64 string, expected a valid base64 string")
		}
		if len(data) > maxUserData {
			f.fail("user_data", fmt.Sprintf("invalid length %d, expected less than 32 KiB", len(data)))
		}
	}
	if f.has("auto_restart_policy") {
		c.autoRestartPolicy = f.oneOf("auto_restart_policy", restartPolicies)
	}
	if f.has("cpu_platform") {
		c.cpuPlatform = f.oneOf("cpu_platform", cpuPlatforms)
	}
	if f.has("boot_disk") {
		boot := readAttachment(f.object("boot_disk"))
		c.boot = &boot
	}
	for _, d := range f.list("disks") {
		c.disks = append(c.disks, readAttachment(d))
	}
	c.interfaces = readInterfaces(f)
	c.unsupported = f.unsupported(
		"anti_affinity_groups", "external_ips", "multicast_groups", "ssh_public_keys")
	for _, nic := range c.interfaces {
		c.unsupported = orDefault(c.unsupported, nic.unsupported)
	}
	return c
}

// unsupported names the first of some lists in which there is something.
func (f *fields) unsupported(names ...string) string {
	for _, name := range names {
		var wanted []json.RawMessage
		if f.has(name) && f.read(name, "a sequence", &wanted) && len(wanted) > 0 {
			return name
		}
	}
	return ""
}

// lacking is never the rack's answer: it says what this simulator does not give an instance.
func lacking(part string) error {
	return &apiError{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
		"the simulator does not have an instance's %s, which the rack has", part)}
}

func readAttachment(f *fields) diskAttachment {
	if f.variant("create", "attach") == "attach" {
		return diskAttachment{attach: f.name("name")}
	}
	create := readDiskCreate(f)
	create.id = uuid.NewString()
	return diskAttachment{create: &create}
}

// attachments are the disks that the instance shall have, its boot disk first.
func (c instanceCreate) attachments() []diskAttachment {
	if c.boot == nil {
		return c.disks
	}
	return append([]diskAttachment{*c.boot}, c.disks...)
}

// checkSize are the rack's limits for an instance (A50).
func checkSize(ncpus int, memory int64) error {
	const maxCPUs, maxMemory = 254, 1536 * gibibyte
	switch {
	case ncpus > maxCPUs:
		return invalidRequest("cannot have more than %d vCPUs per instance", maxCPUs)
	case memory < gibibyte:
		return invalidValue("size", "memory must be at least 1 GiB")
	case memory%gibibyte != 0:
		return invalidValue("size", "memory must be divisible by 1 GiB")
	case memory > maxMemory:
		return invalidValue("size", "memory must be less than or equal to 1536 GiB")
	case ncpus == 0:
		return lacking("ncpus of 0")
	}
	return nil
}

// instanceProblem is what the rack says, in its order, before it looks at the name (A66).
func (s *Server) instanceProblem(tx *store.Tx, owner store.Project, c instanceCreate) error {
	if err := checkSize(c.ncpus, c.memory); err != nil {
		return err
	}
	attachments := c.attachments()
	if limit := s.switches.get().DiskLimit; len(attachments) > limit {
		return invalidRequest("cannot attach more than %d disks to instance", limit)
	}
	for _, a := range attachments {
		if a.create == nil {
			continue
		}
		if _, err := s.describeDisk(tx, owner, *a.create, &store.Disk{}); err != nil {
			return err
		}
	}
	if c.jumboFrames {
		return invalidRequest("enable_jumbo_frames may only be set on an instance when the " +
			"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator")
	}
	return interfacesProblem(c.interfaces)
}
