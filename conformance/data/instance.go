package data

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// rackMessage returns the rack's message of a refusal, without the dump that the client adds.
func rackMessage(err error) string {
	refused := (*oxide.HTTPError)(nil)
	switch {
	case !errors.As(err, &refused):
		return err.Error()
	case refused.ErrorResponse == nil:
		return fmt.Sprintf("HTTP status %d, without a message of the rack",
			refused.HTTPResponse.StatusCode)
	}
	r := refused.ErrorResponse
	return fmt.Sprintf("%s (%s, request %s)", r.Message, r.ErrorCode, r.RequestId)
}

// stop stops an instance that nobody else uses at this moment, and waits until it is stopped.
func (s *checkRun) stop(ctx context.Context, instance string) error {
	if s.MayStop != nil {
		if err := s.MayStop(ctx, instance); err != nil {
			return err
		}
	}
	_, err := s.Oxide.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)})
	if err != nil {
		return fmt.Errorf("stop instance %s: %s", instance, rackMessage(err))
	}
	_, err = s.awaitState(ctx, instance, oxide.InstanceStateStopped)
	return err
}

// start starts an instance if it is stopped, and waits until it runs. It reports whether it was
// stopped.
func (s *checkRun) start(ctx context.Context, instance string) (started bool, err error) {
	found, err := s.awaitState(ctx, instance, oxide.InstanceStateStopped,
		oxide.InstanceStateFailed, oxide.InstanceStateRunning)
	if err != nil || found == oxide.InstanceStateRunning {
		return false, err
	}
	if _, err := s.Oxide.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instance)}); err != nil {
		return true, fmt.Errorf("start instance %s: %s", instance, rackMessage(err))
	}
	_, err = s.awaitState(ctx, instance, oxide.InstanceStateRunning)
	return true, err
}

// awaitState waits until an instance is in one of the states, and returns that.
func (s *checkRun) awaitState(ctx context.Context, instance string, want ...oxide.InstanceState) (
	found oxide.InstanceState, err error) {
	return found, harness.Await(ctx, startTimeout, func() error {
		i, err := s.Oxide.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err != nil {
			return fmt.Errorf("read instance %s: %s", instance, rackMessage(err))
		}
		if found = i.RunState; !slices.Contains(want, found) {
			return fmt.Errorf("instance %s is %s, expected %q", instance, found, want)
		}
		return nil
	})
}

// restart stops the instance as hard as a rack does, and starts it. Its mounts are gone
// afterwards.
func (u *use) restart(ctx context.Context) error {
	if err := u.stop(ctx, u.instance); err != nil {
		return err
	}
	return u.revive(ctx)
}

// revive starts the instance if it does not run, and connects to it again.
func (u *use) revive(ctx context.Context) error {
	u.stopped, u.mounted = true, false
	u.guest.Kill()
	if _, err := u.start(ctx, u.instance); err != nil {
		return err
	}
	// The instance answers some time after the rack calls it running.
	err := harness.Await(ctx, startTimeout, func() error { return u.guest.Reconnect(ctx) })
	u.stopped = err != nil
	return err
}

// checkHelper attaches a volume of each kind to a stopped instance, starts it and uses the
// volumes, stops and starts it, and reads the volumes again. The instance is stopped at the end.
func checkHelper(s *checkRun) {
	h := &helper{checkRun: s}
	for _, s.access = range s.accesses() {
		h.uses = append(h.uses, s.publish(s.create(1, nil), s.Helper.InstanceID))
	}
	// The volumes can be detached only when the instance is stopped.
	s.last = append(s.last, h.stop)
	for round := range 2 {
		h.start()
		h.compareDisks()
		for _, u := range h.uses {
			s.during(u.volume.access+", in the stopped instance that was started", func() {
				u.useAgain(round == 0)
			})
		}
		s.must(h.stop(s.ctx))
	}
}

type helper struct {
	*checkRun
	uses []*use
	// guest is nil while the instance is stopped.
	guest *guest.AgentClient
}

func (u *use) useAgain(first bool) {
	u.compareDevice()
	u.mount()
	if first {
		u.write(true, u.pattern(1))
		return
	}
	u.verify(u.pattern(1))
	u.must(u.unmount(u.ctx))
}

// compareDisks demands that the rack lists all volumes among the instance's disks.
func (h *helper) compareDisks() {
	disks, err := h.Oxide.InstanceDiskListAllPages(h.ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(h.Helper.InstanceID)})
	if err != nil {
		h.fail("list the disks of instance %s: %s", h.Helper.InstanceID, rackMessage(err))
	}
	listed := map[string]bool{}
	for _, d := range disks {
		listed[d.Id] = true
	}
	for _, u := range h.uses {
		if !listed[u.volume.GetVolumeId()] {
			h.fail("the rack does not list volume %s among the %d disks of instance %s, "+
				"to which it is attached", u.volume.name, len(disks), h.Helper.InstanceID)
		}
	}
}

// start starts the instance and connects to it.
func (h *helper) start() {
	started, err := h.checkRun.start(h.ctx, h.Helper.InstanceID)
	h.Helper.Started = h.Helper.Started || started
	if !started && err == nil {
		err = fmt.Errorf("instance %s runs, and this check did not start it: it is somebody else's, "+
			"and was left", h.Helper.InstanceID)
	}
	h.must(err)
	var reached *guest.AgentClient
	h.must(harness.Await(h.ctx, startTimeout, func() (err error) {
		reached, err = h.Helper.Connect(h.ctx)
		return err
	}))
	h.guest = reached
	for _, u := range h.uses {
		u.guest = reached
	}
}

// stop stops the instance as hard as the rack does, if the check started it. Its mounts are gone
// afterwards.
func (h *helper) stop(ctx context.Context) error {
	if !h.Helper.Started {
		return nil
	}
	err := h.checkRun.stop(ctx, h.Helper.InstanceID)
	h.Helper.Started = err != nil
	if h.guest != nil {
		h.guest.Kill()
		h.guest = nil
	}
	for _, u := range h.uses {
		u.mounted = false
	}
	return err
}

// checkDevices attaches two volumes of different sizes, and compares the devices in the instance
// with the answers of rack and driver.
func checkDevices(s *checkRun) {
	var uses []*use
	for i := range 2 {
		uses = append(uses, s.attach(s.create(int64(i+1), nil), s.A))
	}
	for _, u := range uses {
		u.compareDevice()
	}
	s.during("after the detach", func() {
		for _, u := range uses {
			u.detach()
		}
	})
}

// compareDevice demands that the instance shows the volume's disk with the rack's size and block
// size.
func (u *use) compareDevice() {
	disk, err := u.Oxide.DiskView(u.ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(u.volume.GetVolumeId())})
	if err != nil {
		u.fail("read the disk of volume %s: %s", u.volume.name, rackMessage(err))
	}
	if name := string(disk.Name); name[:min(len(name), 20)] != u.serial() {
		u.fail("the disk of volume %s is named %q on the rack; the driver names it %q", u.volume.name,
			name, u.serial())
	}
	u.awaitDevices(1)
	facts := u.facts(u.guest)
	info := got[*csi.NodeGetInfoResponse](u.checkRun)(
		csi.NewNodeClient(u.guest).NodeGetInfo(u.ctx, &csi.NodeGetInfoRequest{}))
	var errs []error
	differ := func(what string, shown, want any) {
		if shown != want {
			errs = append(errs, fmt.Errorf("instance %s, the device with the serial %q: expected %s, %v; "+
				"found %v", u.instance, u.serial(), what, want, shown))
		}
	}
	d := facts.With(u.serial())[0]
	u.Log.note("devices of an instance", 1, "devices")
	differ("the size of the rack's disk", d.SizeBytes, int64(disk.Size))
	differ("the block size of the rack's disk", d.BlockSize, int64(disk.BlockSize))
	differ("the size of the driver's volume", d.SizeBytes, u.volume.GetCapacityBytes())
	differ("the id that the driver has of the instance", facts.InstanceID, info.GetNodeId())
	u.must(errors.Join(errs...))
}
