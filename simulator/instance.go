package simulator

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"
)

func (s *Server) instanceList(r *request) (int, any, error) {
	return listInProject(s, r, instances)
}

func (s *Server) instanceView(r *request) (int, any, error) {
	var i instance
	err := s.store.view(func(tx *tx) error {
		var err error
		i, err = lookup(s, r, tx, instances, r.path.Get("instance"))
		return err
	})
	return http.StatusOK, i, err
}

// onInstance finds the instance of the path and holds it while its record is changed and work is
// done with it.
func (s *Server) onInstance(r *request, change func(*tx, *instance) error,
	work func(before, after instance) error,
) (instance, error) {
	var before, after instance
	err := s.store.view(func(tx *tx) error {
		var err error
		before, err = lookup(s, r, tx, instances, r.path.Get("instance"))
		return err
	})
	if err != nil {
		return before, err
	}
	defer s.locks.Lock(before.ID)()
	err = s.store.update(func(tx *tx) error {
		if before, err = find(tx, instances, "", selector{id: before.ID}); err != nil {
			return err
		}
		after = before
		if err := change(tx, &after); err != nil || after == before {
			return err
		}
		return instances.put(tx, after)
	})
	if err != nil || after == before {
		return after, err
	}
	if err := work(before, after); err != nil {
		return before, errors.Join(err, s.putInstance(before))
	}
	return after, nil
}

// errStillCreating refuses to change what is being made (A53).
var errStillCreating = invalidRequest(
	"cannot change instance state while it is still being created")

// instanceStart starts a stopped or failed instance; one that runs or is about to is left alone
// (A45).
func (s *Server) instanceStart(r *request) (int, any, error) {
	i, err := s.onInstance(r, func(_ *tx, i *instance) error {
		switch i.RunState {
		case runStopped, runFailed:
			i.become(runStarting)
		case runStopping:
			return conflict("instance must finish stopping before it can be started")
		case stateCreating:
			return errStillCreating
		}
		return nil
	}, func(_, i instance) error {
		if err := s.plugAll(r, i); err != nil {
			return errors.Join(err, s.unplugAll(i))
		}
		s.settleLater(i)
		return nil
	})
	return http.StatusAccepted, i, err
}

// instanceStop halts the guest hard and at once; the state follows later (A46).
func (s *Server) instanceStop(r *request) (int, any, error) {
	i, err := s.onInstance(r, func(_ *tx, i *instance) error {
		switch i.RunState {
		case runStarting, runRunning, runRebooting:
			i.become(runStopping)
		case runFailed:
			i.become(runStopped)
		case stateCreating:
			return errStillCreating
		}
		return nil
	}, func(before, i instance) error {
		if !before.active() {
			return nil
		}
		if err := s.unplugAll(i); err != nil {
			return err
		}
		s.settleLater(i)
		return nil
	})
	return http.StatusAccepted, i, err
}

// instanceReboot takes the devices away and brings them back, in a new order (A47). An instance
// that does not come back with all of them fails, which its caller is not told (A60).
func (s *Server) instanceReboot(r *request) (int, any, error) {
	i, err := s.onInstance(r, func(_ *tx, i *instance) error {
		switch i.RunState {
		case runRunning, runStarting, runRebooting:
			i.become(runRebooting)
		case stateCreating:
			return errStillCreating
		case runStopping:
			return invalidRequest("cannot reboot an instance in state %s", i.RunState)
		default:
			return invalidRequest("cannot reboot an instance in state %s with no VMM", i.RunState)
		}
		return nil
	}, func(_, i instance) error {
		err := s.unplugAll(i)
		if err == nil {
			err = s.plugAll(r, i)
		}
		if err != nil {
			s.failInstance(i, err)
			return nil
		}
		s.settleLater(i)
		return nil
	})
	return http.StatusAccepted, i, err
}

// failInstance ends an instance that cannot go on: it has no devices any more, and can be started
// again. The caller holds it.
func (s *Server) failInstance(i instance, cause error) {
	s.log.Error("an instance has failed", slog.String("instance", i.ID),
		slog.String("error", cause.Error()))
	i.become(runFailed)
	if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
		s.log.Error("an instance is stuck", slog.String("instance", i.ID),
			slog.String("error", err.Error()))
	}
}

// settleLater ends a transition after its delay. One that the server does not live to see ends
// when the directory is next served.
func (s *Server) settleLater(i instance) {
	delay := time.Duration(s.switches.get().InstanceDelay)
	s.background(func() {
		if !wait(s.life, delay) {
			return
		}
		err := s.store.update(func(tx *tx) error {
			now, ok, err := instances.get(tx, i.ID)
			if err != nil || !ok || !now.TimeRunStateUpdated.Equal(i.TimeRunStateUpdated.Time) {
				return err // another transition began meanwhile
			}
			now.become(settled[now.RunState])
			return instances.put(tx, now)
		})
		if err != nil {
			s.log.Error("an instance is stuck", slog.String("instance", i.ID),
				slog.String("state", i.RunState), slog.String("error", err.Error()))
		}
	})
}

func (s *Server) attachedDisks(i instance) (attached []disk, err error) {
	err = s.store.view(func(tx *tx) error {
		attached, err = tx.disksOf(i.ID)
		return err
	})
	return attached, err
}

func (s *Server) plugAll(r *request, i instance) error {
	attached, err := s.attachedDisks(i)
	if err != nil {
		return err
	}
	for _, d := range attached {
		unlock := s.locks.Lock(d.ID)
		err := s.plane.Plug(d.device(i.ID), r.device(s.switches.get().DeviceDelay))
		unlock()
		if err != nil {
			return fmt.Errorf("start with disk %s: %w", d.Name, err)
		}
	}
	return nil
}

func (s *Server) unplugAll(i instance) error {
	attached, err := s.attachedDisks(i)
	if err != nil {
		return err
	}
	for _, d := range attached {
		unlock := s.locks.Lock(d.ID)
		err := s.plane.Unplug(i.ID, d.ID)
		unlock()
		if err != nil {
			return fmt.Errorf("stop with disk %s: %w", d.Name, err)
		}
	}
	return nil
}

// instanceDelete deletes a stopped or failed instance; its disks become detached (A48).
func (s *Server) instanceDelete(r *request) (int, any, error) {
	var i instance
	err := s.store.view(func(tx *tx) error {
		var err error
		i, err = lookup(s, r, tx, instances, r.path.Get("instance"))
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer s.locks.Lock(i.ID)()
	err = s.store.update(func(tx *tx) error {
		if i, err = find(tx, instances, "", selector{id: i.ID}); err != nil {
			return err
		}
		switch {
		case i.active():
			return invalidRequest("cannot delete instance: instance is running or has not yet " +
				"fully stopped")
		case i.RunState != runStopped && i.RunState != runFailed:
			return invalidRequest("instance cannot be deleted in state %q", i.RunState)
		}
		return tx.deleteInstance(i)
	})
	if err != nil {
		return 0, nil, err
	}
	return http.StatusNoContent, nil, s.plane.RemoveGuest(i.ID)
}

func (tx *tx) deleteInstance(i instance) error {
	attached, err := tx.disksOf(i.ID)
	if err != nil {
		return err
	}
	for _, d := range attached {
		d.State = diskState{State: stateDetached}
		if err := tx.putDisk(d); err != nil {
			return err
		}
	}
	return errors.Join(tx.Bucket(bucketInterfaces).Delete([]byte(i.ID)),
		tx.Bucket(bucketSagas).Delete([]byte(i.ID)), instances.delete(tx, i))
}

type instanceUpdate struct {
	ncpus             int
	memory            int64
	bootDisk          selector
	autoRestartPolicy *string
	cpuPlatform       *string
	jumboFrames       bool
	// unsupported names a part of the request that this simulator does not have.
	unsupported string
}

func parseInstanceUpdate(f *fields) any {
	u := instanceUpdate{ncpus: f.cpus("ncpus"), memory: f.byteCount("memory")}
	if f.nullable("boot_disk") {
		u.bootDisk = f.nameOrID("boot_disk")
	}
	if f.nullable("auto_restart_policy") {
		u.autoRestartPolicy = f.oneOf("auto_restart_policy", restartPolicies)
	}
	if f.nullable("cpu_platform") {
		u.cpuPlatform = f.oneOf("cpu_platform", cpuPlatforms)
	}
	f.read("enable_jumbo_frames", "a boolean", &u.jumboFrames)
	u.unsupported = f.unsupported("multicast_groups")
	return u
}

var (
	restartPolicies = []string{"never", "best_effort"}
	cpuPlatforms    = []string{"amd_milan", "amd_turin", "amd_turin_v2"}
)

// instanceUpdate replaces all that can be changed; what changes boot disk, size or processor needs
// the instance stopped, and the time of its last change stays (A49).
func (s *Server) instanceUpdate(r *request) (int, any, error) {
	u := r.body.(instanceUpdate)
	if u.unsupported != "" {
		return 0, nil, lacking(u.unsupported)
	}
	i, err := s.onInstance(r, func(tx *tx, i *instance) error {
		if err := checkSize(u.ncpus, u.memory); err != nil {
			return err
		}
		if u.jumboFrames {
			return invalidRequest("enable_jumbo_frames may only be set to true when the " +
				"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator")
		}
		resized := u.ncpus != i.NCPUs || u.memory != i.Memory ||
			value(u.cpuPlatform) != value(i.CPUPlatform)
		if resized && i.active() {
			return conflict("instance must be stopped to change CPU or memory")
		}
		boot, err := tx.bootDisk(*i, u.bootDisk)
		if err != nil {
			return err
		}
		if value(boot) != value(i.BootDiskID) && i.active() {
			return conflict("instance must be stopped to set boot disk")
		}
		i.NCPUs, i.Memory, i.BootDiskID = u.ncpus, u.memory, boot
		i.AutoRestartPolicy, i.CPUPlatform = u.autoRestartPolicy, u.cpuPlatform
		i.AutoRestartEnabled = value(u.autoRestartPolicy) != "never"
		return nil
	}, func(_, _ instance) error { return nil })
	return http.StatusOK, i, err
}

// bootDisk finds the disk that shall be the boot disk; it must be attached already.
func (tx *tx) bootDisk(i instance, sel selector) (*string, error) {
	if !sel.given() {
		return nil, nil
	}
	d, err := find(tx, disks, i.ProjectID, sel)
	if err != nil {
		return nil, err
	}
	if !d.attachedTo(i.ID) {
		return nil, conflict("boot disk must be attached")
	}
	return &d.ID, nil
}
