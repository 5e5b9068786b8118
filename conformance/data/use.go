package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// use is the attachment of a volume to an instance, and the volume's mounts there.
type use struct {
	*checkRun
	harness.Placement
	volume   *volume
	guest    *guest.AgentClient
	instance string
	// attached and mounted make the cleanup detach and unmount the volume. They are set before an
	// attach and a mount, because one that fails may have taken effect.
	attached, mounted bool
	// doubtful makes unpublish repeat the attach, because a failed attach may still take effect.
	doubtful bool
	// stopped makes end() call revive() first, because the instance or its agent may not be running.
	stopped bool
}

func (u *use) mount() {
	u.Staging = u.guest.Path(u.volume.name, "staging")
	u.Target = u.guest.Path(u.volume.name, "workload", "volume")
	harness.Got(guest.MakeDirs(u.ctx, u.guest, []string{u.Staging, filepath.Dir(u.Target)}))
	u.mounted = true
	harness.Must(u.nodeCall(u.ctx, u.Stage, "stage"))
	harness.Must(u.nodeCall(u.ctx, u.Publish, "publish"))
}

func (u *use) nodeCall(ctx context.Context, call func(context.Context, csi.NodeClient) error,
	verb string) error {
	return repeat(ctx, func() error {
		return harness.Wrap(call(ctx, csi.NewNodeClient(u.guest)), "%s volume %s", verb, u.volume.name)
	})
}

func (u *use) unmount(ctx context.Context) error {
	if !u.mounted {
		return nil
	}
	err := u.nodeCall(ctx, u.Unpublish, "unpublish")
	if err == nil {
		err = u.nodeCall(ctx, u.Unstage, "unstage")
	}
	u.mounted = err != nil
	return err
}

func (u *use) publish(ctx context.Context) error {
	req := harness.PublishRequest(u.volume.Volume, u.instance)
	req.VolumeCapability = u.Capability
	err := repeat(ctx, func() error {
		resp, err := u.Controller.ControllerPublishVolume(ctx, req)
		u.PublishContext = resp.GetPublishContext()
		return harness.Wrap(err, "attach volume %s to instance %s", u.volume.name, u.instance)
	})
	u.doubtful = err != nil && mayExist(err)
	return err
}

// unpublish detaches the volume. After an attach whose outcome is unknown, it first attaches again,
// which waits for the earlier attach. Otherwise the rack may finish that attach after the detach.
func (u *use) unpublish(ctx context.Context) error {
	if !u.attached {
		return nil
	}
	if u.doubtful {
		_ = u.publish(ctx) // only its end matters, not its result
	}
	return repeat(ctx, func() error {
		_, err := u.Controller.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(u.volume.Volume, u.instance))
		u.attached = err != nil
		return harness.Wrap(err, "detach volume %s", u.volume.name)
	})
}

func (u *use) detach() {
	harness.Must(u.unpublish(u.ctx))
	u.awaitDevices(0)
	if u.volume.disk != nil {
		u.volume.disk.visit++
	}
}

func (u *use) end(ctx context.Context) (err error) {
	if u.stopped {
		err = u.revive(ctx)
	}
	return errors.Join(err, u.unmount(ctx), u.unpublish(ctx))
}

func (u *use) leave() {
	harness.Must(u.unmount(u.ctx))
	u.detach()
}

func (u *use) serial() string {
	name := u.volume.GetVolumeContext()["diskName"]
	return name[:min(len(name), 20)]
}

// awaitDevices waits until the number of the instance's devices with the volume's serial is want.
func (u *use) awaitDevices(want int) {
	timeout := cmp.Or(u.DeviceTimeout, 30*time.Second)
	harness.Must(harness.Await(u.ctx, timeout, func() error {
		facts, err := guest.ReadFacts(u.ctx, u.guest, guest.Nothing{})
		if err != nil {
			return err
		}
		var serials, names []string
		for _, d := range facts.Devices {
			if serials = append(serials, d.Serial); d.Serial == u.serial() {
				names = append(names, d.Name)
			}
		}
		if len(names) != want {
			return fmt.Errorf("instance %s shows %d devices with the serial %q of volume %s, not %d: %q; "+
				"the serials it shows are %q",
				u.instance, len(names), u.serial(), u.volume.name, want, names, serials)
		}
		return nil
	}))
}

func (u *use) place() guest.Place {
	if u.volume.access == "block" {
		return guest.Place{Path: u.Target, Serial: u.serial()}
	}
	return guest.Place{Path: filepath.Join(u.Target, "blocks")}
}

// pattern returns the blocks of one write. On a raw volume they spread over its first half.
func (u *use) pattern(generation uint64) guest.Pattern {
	p := guest.Pattern{Seed: u.volume.seed, Generation: generation, Count: cmp.Or(u.Blocks, 512)}
	if u.volume.access == "block" {
		spread := volumeBytes / (2 * p.Count) / guest.BlockBytes * guest.BlockBytes
		p.Stride = max(spread, guest.BlockBytes)
	}
	return p
}

// lastBlock returns a pattern of only the last block of a device of volumeBytes.
func (u *use) lastBlock(generation uint64) guest.Pattern {
	return guest.Pattern{Seed: u.volume.seed, Generation: generation,
		First: volumeBytes/guest.BlockBytes - 1, Count: 1}
}

func (u *use) patterns(generation uint64) []guest.Pattern {
	p := u.pattern(generation)
	if u.volume.access != "block" {
		return []guest.Pattern{p}
	}
	return []guest.Pattern{p, next(p), u.lastBlock(generation)}
}

func next(p guest.Pattern) guest.Pattern {
	p.First += p.Count
	return p
}

func (u *use) write(sync bool, patterns ...guest.Pattern) {
	harness.Must(u.tryWrite(sync, patterns...))
}

// tryWrite is like write, but returns an error: only the check's own goroutine may panic.
func (u *use) tryWrite(sync bool, patterns ...guest.Pattern) error {
	for _, p := range patterns {
		_, err := guest.Write(u.ctx, u.guest, guest.Task{Place: u.place(), Pattern: p, Sync: sync})
		if err != nil {
			return harness.Wrap(err, "write volume %s", u.volume.name)
		}
		for n := p.First; n < p.First+p.Count && u.volume.disk != nil; n++ {
			u.volume.disk.write(p.Range(n))
		}
	}
	return nil
}

func (u *use) verify(patterns ...guest.Pattern) {
	for _, p := range patterns {
		found, err := guest.Verify(u.ctx, u.guest, guest.Task{Place: u.place(), Pattern: p})
		if err == nil && found.Read != p.Count {
			err = fmt.Errorf("%d blocks were read, not %d", found.Read, p.Count)
		}
		harness.Must(harness.Wrap(errors.Join(err, found.Err()), "verify volume %s", u.volume.name))
		u.Log.more.Look(report.Measure{What: "what was written, on " + u.volume.access,
			Looked: found.Read, Unit: "blocks"})
		for n := p.First; n < p.First+p.Count && u.volume.disk != nil; n++ {
			u.volume.disk.read(p.Range(n))
		}
	}
}

// checkReturn writes each block twice, in generations 1 and 2, so that it notices a lost write.
func checkReturn(s *checkRun) {
	u := s.newInUse(s.A)
	for generation := uint64(1); generation <= 2; generation++ {
		// Do not sync these blocks: unstaging must write them to the disk.
		u.write(false, u.patterns(generation)...)
		harness.Must(u.unmount(s.ctx))
		u.mount()
		s.during("after unstaging and staging", func() { u.verify(u.patterns(generation)...) })
		u.leave()
		u = s.inUse(u.volume, s.A)
		s.during("after detaching and attaching", func() { u.verify(u.patterns(generation)...) })
	}
}

func checkMove(s *checkRun) {
	u := s.newInUse(s.A)
	written := []guest.Pattern{u.pattern(1)}
	for _, g := range []*guest.AgentClient{s.B, s.A} {
		last := written[len(written)-1]
		u.write(false, last)
		u.leave()
		u = s.inUse(u.volume, g)
		s.during("moved to "+g.Name, func() { u.verify(written...) })
		// The volume's instance shows the device now. The other instance must not.
		away := *u
		if away.guest, away.instance = s.A, "of this machine"; g == s.A {
			away.guest, away.instance = s.B, "the second"
		}
		s.during("moved to "+g.Name+", the volume is in another instance, too", func() {
			away.awaitDevices(0)
		})
		written = append(written, next(last))
	}
}

func checkRestart(s *checkRun) {
	u := s.newInUse(s.B)
	u.write(true, u.pattern(1))
	harness.Must(u.stop(s.ctx, u.instance))
	harness.Must(u.revive(s.ctx))
	u.mount()
	s.during("after the instance was stopped and started", func() { u.verify(u.pattern(1)) })
}

// checkCut detaches a volume that is mounted and has dirty pages.
func checkCut(s *checkRun) {
	lost := s.newInUse(s.A)
	synced, dirty := lost.pattern(1), next(lost.pattern(1))
	lost.write(true, synced)
	lost.write(false, dirty)
	lost.detach()
	u := s.inUse(lost.volume, s.B)
	s.during("after a detach while it was mounted", func() { u.verify(synced) })
	found := harness.Got(guest.Verify(s.ctx, u.guest, guest.Task{Place: u.place(), Pattern: dirty}))
	for _, f := range found.Findings {
		if !f.Lost {
			s.fail("block %d, which was written and never synced, is %s: it may be what was "+
				"written, or zero, and nothing else", f.Block, f.What)
		}
	}
}

func (s *checkRun) stop(ctx context.Context, instance string) (err error) {
	defer harness.Catch(&err)
	harness.Must(s.MayStop(ctx, instance))
	_, refused := s.Oxide.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)})
	harness.Must(harness.Wrap(harness.Refusal(refused), "stop instance %s", instance))
	_, err = s.awaitState(ctx, instance, oxide.InstanceStateStopped)
	return err
}

// start starts an instance. It returns false if the instance was already running.
func (s *checkRun) start(ctx context.Context, instance string) (started bool, err error) {
	defer harness.Catch(&err)
	if harness.Got(s.awaitState(ctx, instance, oxide.InstanceStateStopped, oxide.InstanceStateFailed,
		oxide.InstanceStateRunning)) == oxide.InstanceStateRunning {
		return false, nil
	}
	started = true
	_, refused := s.Oxide.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instance)})
	harness.Must(harness.Wrap(harness.Refusal(refused), "start instance %s", instance))
	_, err = s.awaitState(ctx, instance, oxide.InstanceStateRunning)
	return started, err
}

func (s *checkRun) awaitState(ctx context.Context, instance string, want ...oxide.InstanceState) (
	oxide.InstanceState, error) {
	return harness.Administrator{Client: s.Oxide}.AwaitState(ctx, startTimeout, instance, want...)
}

// revive starts the instance, if necessary, and a new agent. The mounts are lost.
func (u *use) revive(ctx context.Context) error {
	u.stopped, u.mounted = true, false
	u.guest.Kill()
	if _, err := u.start(ctx, u.instance); err != nil {
		return err
	}
	// An instance answers some time after the rack reports it as running.
	err := harness.Await(ctx, startTimeout, func() error { return u.guest.Reconnect(ctx) })
	u.stopped = err != nil
	return err
}

// checkHelper attaches one volume per kind of access to a stopped instance, starts the instance,
// and writes the volumes. Then it restarts the instance and reads the volumes.
func checkHelper(s *checkRun) {
	for _, s.access = range s.accesses() {
		s.publish(s.create(1, nil), s.Helper.InstanceID)
	}
	// The volumes can be detached only when the instance is stopped.
	s.last = append(s.last, s.stopHelper)
	for round := range 2 {
		s.startHelper()
		disks, err := s.Oxide.InstanceDiskListAllPages(s.ctx,
			oxide.InstanceDiskListParams{Instance: oxide.NameOrId(s.Helper.InstanceID)})
		harness.Must(harness.Wrap(harness.Refusal(err), "list the disks of instance %s",
			s.Helper.InstanceID))
		for _, u := range s.uses {
			id := u.volume.GetVolumeId()
			if !slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == id }) {
				s.fail("the rack does not list volume %s among the %d disks of instance %s, "+
					"to which it is attached", u.volume.name, len(disks), s.Helper.InstanceID)
			}
		}
		for _, u := range s.uses {
			s.during(u.volume.access+", in the stopped instance that was started", func() {
				u.compareDevice()
				u.mount()
				if round == 0 {
					u.write(true, u.pattern(1))
					return
				}
				u.verify(u.pattern(1))
				harness.Must(u.unmount(u.ctx))
			})
		}
		harness.Must(s.stopHelper(s.ctx))
	}
}

func (s *checkRun) startHelper() {
	started, err := s.start(s.ctx, s.Helper.InstanceID)
	s.Helper.Started = s.Helper.Started || started
	if !started && err == nil {
		err = fmt.Errorf("instance %s runs, and this check did not start it: it is somebody else's, "+
			"and was left", s.Helper.InstanceID)
	}
	harness.Must(err)
	var reached *guest.AgentClient
	harness.Must(harness.Await(s.ctx, startTimeout, func() (err error) {
		reached, err = s.Helper.Connect(s.ctx)
		return err
	}))
	for _, u := range s.uses {
		u.guest = reached
	}
}

// stopHelper stops the helper if the check started it. The stop also ends the mounts there.
func (s *checkRun) stopHelper(ctx context.Context) error {
	if !s.Helper.Started {
		return nil
	}
	err := s.stop(ctx, s.Helper.InstanceID)
	s.Helper.Started = err != nil
	for _, u := range s.uses {
		if u.guest != nil { // all uses have the same guest, and Kill may be called again
			u.guest.Kill()
		}
		u.guest, u.mounted = nil, false
	}
	return err
}

func checkDevices(s *checkRun) {
	for i := range 2 {
		s.attach(s.create(int64(i+1), nil), s.A)
	}
	for _, u := range s.uses {
		u.compareDevice()
	}
	s.during("after the detach", func() {
		for _, u := range s.uses {
			u.detach()
		}
	})
}

func (u *use) compareDevice() {
	disk, err := u.Oxide.DiskView(u.ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(u.volume.GetVolumeId())})
	harness.Must(harness.Wrap(harness.Refusal(err), "read the disk of volume %s", u.volume.name))
	if name := string(disk.Name); name[:min(len(name), 20)] != u.serial() {
		u.fail("the disk of volume %s is named %q on the rack; the driver names it %q", u.volume.name,
			name, u.serial())
	}
	u.awaitDevices(1)
	facts := u.facts(u.guest)
	info := harness.Got(csi.NewNodeClient(u.guest).NodeGetInfo(u.ctx, &csi.NodeGetInfoRequest{}))
	var errs []error
	differ := func(what string, shown, want any) {
		if shown != want {
			errs = append(errs, fmt.Errorf("instance %s, the device with the serial %q: expected %s, %v; "+
				"found %v", u.instance, u.serial(), what, want, shown))
		}
	}
	d := facts.With(u.serial())[0]
	u.Log.more.Look(report.Measure{What: "devices of an instance", Looked: 1, Unit: "devices"})
	differ("the size of the rack's disk", d.SizeBytes, int64(disk.Size))
	differ("the block size of the rack's disk", d.BlockSize, int64(disk.BlockSize))
	differ("the size of the driver's volume", d.SizeBytes, u.volume.GetCapacityBytes())
	differ("the id that the driver has of the instance", facts.InstanceID, info.GetNodeId())
	harness.Must(errors.Join(errs...))
}
