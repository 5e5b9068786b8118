package simulator

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"

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
		hostname: f.text("hostname"), ncpus: f.cpus("ncpus"), memory: f.byteCount("memory"), start: f.flag("start", true),
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

// checkSize are the rack's limits for an instance (A50).
func checkSize(ncpus int, memory int64) error {
	const maxCPUs, maxMemory = 254, 1536 * gibibyte
	switch {
	case ncpus < 1 || ncpus > maxCPUs:
		return invalidValue("ncpus", "instance must have between 1 and %d vCPUs", maxCPUs)
	case memory < gibibyte:
		return invalidValue("size", "memory must be at least 1 GiB")
	case memory%gibibyte != 0:
		return invalidValue("size", "memory must be divisible by 1 GiB")
	case memory > maxMemory:
		return invalidValue("size", "memory must be less than or equal to 1.5 TiB")
	}
	return nil
}

// instanceCreate is the rack's saga: the instance, its disks, their attachment, and the start; what
// fails takes everything back (A51).
func (s *Server) instanceCreate(r *request) (int, any, error) {
	c := r.body.(instanceCreate)
	if c.unsupported != "" {
		return 0, nil, lacking(c.unsupported)
	}
	// Who may not do this is told so before what is wrong with it (A28).
	err := s.store.view(func(tx *tx) error {
		_, err := s.queryProject(r, tx)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	attachments := c.disks
	if c.boot != nil {
		attachments = append([]diskAttachment{*c.boot}, c.disks...)
	}
	if limit := s.switches.get().DiskLimit; len(attachments) > limit {
		return 0, nil, invalidRequest("cannot attach more than %d disks to instance", limit)
	}
	if err := checkSize(c.ncpus, c.memory); err != nil {
		return 0, nil, err
	}
	i, owner, err := s.insertInstance(r, c, attachments)
	if err != nil {
		return 0, nil, err
	}
	err = s.fillInstance(r, owner, i, attachments)
	if err == nil {
		i, err = s.finishInstance(r, i, c)
	}
	r.about(i.identity)
	if err != nil {
		return 0, nil, s.unmakeInstance(i, attachments, err)
	}
	return http.StatusCreated, i, nil
}

// insertInstance records the instance, and what is being made for it.
func (s *Server) insertInstance(r *request, c instanceCreate, attachments []diskAttachment) (
	i instance, owner project, err error,
) {
	i = instance{
		identity: newIdentity(uuid.NewString(), c.name, c.description),
		NCPUs:    c.ncpus, Memory: c.memory, Hostname: c.hostname,
		AutoRestartEnabled: value(c.autoRestartPolicy) != "never",
		AutoRestartPolicy:  c.autoRestartPolicy, CPUPlatform: c.cpuPlatform,
		EnableJumboFrames: c.jumboFrames,
	}
	i.become(stateCreating)
	created := []string{}
	for _, a := range attachments {
		if a.create != nil {
			created = append(created, a.create.id)
		}
	}
	err = s.store.update(func(tx *tx) error {
		if owner, err = s.queryProject(r, tx); err != nil {
			return err
		}
		i.ProjectID = owner.ID
		if instances.taken(tx, owner.ID, i.Name) {
			return alreadyExists("instance", i.Name)
		}
		return tx.insertInstance(i, c.interfaces, created)
	})
	return i, owner, err
}

// insertInstance writes the record; made are the disks that go if the instance cannot be created.
func (tx *tx) insertInstance(i instance, interfaces []interfaceCreate, made []string) error {
	if err := tx.putInterfaces(i, interfaces); err != nil {
		return err
	}
	if made != nil {
		data, err := json.Marshal(made)
		if err != nil {
			return err
		}
		if err := tx.Bucket(bucketSagas).Put([]byte(i.ID), data); err != nil {
			return err
		}
	}
	return instances.put(tx, i)
}

func (s *Server) fillInstance(r *request, owner project, i instance,
	attachments []diskAttachment,
) error {
	if err := s.plane.addGuest(guestSpec{i.ID, i.Name}); err != nil {
		return err
	}
	for _, a := range attachments {
		id, err := s.attachmentDisk(r, owner, a)
		if err != nil {
			return err
		}
		s.creating.wait(id) // A32
		unlock := s.locks.lock(i.ID, id)
		_, err = s.attach(r, i.ID, id)
		unlock()
		if err != nil {
			return err
		}
	}
	if r.unwinds() {
		return errInternal
	}
	return nil
}

// attachmentDisk makes or finds the disk, and returns its ID.
func (s *Server) attachmentDisk(r *request, owner project, a diskAttachment) (string, error) {
	if a.create != nil {
		d, err := s.createDisk(r, owner, *a.create)
		return d.ID, err
	}
	var d disk
	err := s.store.view(func(tx *tx) error {
		var err error
		d, err = find(tx, disks, owner.ID, selector{name: a.attach})
		return err
	})
	return d.ID, err
}

// finishInstance makes the instance a stopped one and, where wanted, starts it. A start that fails
// leaves it stopped, and created all the same (A58).
func (s *Server) finishInstance(r *request, made instance, c instanceCreate) (instance, error) {
	defer s.locks.lock(made.ID)()
	i := made
	i.become(runStopped)
	if c.start {
		i.become(runStarting)
	}
	err := s.store.update(func(tx *tx) error {
		if c.boot != nil {
			sel := selector{name: c.boot.attach}
			if c.boot.create != nil {
				sel = selector{id: c.boot.create.id}
			}
			boot, err := tx.bootDisk(i, sel)
			if err != nil {
				return err
			}
			i.BootDiskID = boot
		}
		return errors.Join(tx.Bucket(bucketSagas).Delete([]byte(i.ID)), instances.put(tx, i))
	})
	if err != nil {
		return made, err
	}
	if !c.start {
		return i, nil
	}
	if err := s.plugAll(r, i); err != nil {
		s.log.Error("an instance that was created could not be started",
			slog.String("instance", i.ID), slog.String("error", err.Error()))
		i.become(runStopped)
		if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
			s.log.Error("an instance is stuck", slog.String("instance", i.ID),
				slog.String("error", err.Error()))
		}
		return i, nil
	}
	s.settleLater(i)
	return i, nil
}

func (s *Server) putInstance(i instance) error {
	return s.store.update(func(tx *tx) error { return instances.put(tx, i) })
}

// unmakeInstance takes a half-made instance back.
func (s *Server) unmakeInstance(i instance, attachments []diskAttachment, cause error) error {
	defer s.locks.lock(i.ID)()
	err := s.store.update(func(tx *tx) error { return tx.unwindInstance(i.ID) })
	for _, a := range attachments {
		if err == nil && a.create != nil {
			err = s.plane.removeDisk(a.create.id)
		}
	}
	if err == nil {
		err = s.plane.removeGuest(i.ID)
	}
	if err != nil {
		return fmt.Errorf("%w; and taking the instance back: %w", cause, err)
	}
	return cause
}

// unwindInstance removes an instance that is being created, with the disks created for it.
func (tx *tx) unwindInstance(id string) error {
	var made []string
	if err := json.Unmarshal(tx.Bucket(bucketSagas).Get([]byte(id)), &made); err != nil {
		return fmt.Errorf("read what was made for instance %s: %w", id, err)
	}
	i, err := find(tx, instances, "", selector{id: id})
	if err != nil {
		return err
	}
	if err := tx.deleteInstance(i); err != nil {
		return err
	}
	for _, diskID := range made {
		d, ok, err := disks.get(tx, diskID)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := errors.Join(disks.delete(tx, d), tx.addStorage(-d.Size)); err != nil {
			return err
		}
	}
	return nil
}
