package simulator

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func (s *Server) instanceList(r *request) (int, any, error) {
	return listInProject(s, r, store.Instances)
}

func (s *Server) instanceView(r *request) (int, any, error) {
	var i store.Instance
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		i, err = lookup(s, r, tx, store.Instances, r.path.Get("instance"))
		return err
	})
	return http.StatusOK, i, err
}

// onInstance finds the instance of the path and holds it while its record is changed and work is
// done with it.
func (s *Server) onInstance(r *request, change func(*store.Tx, *store.Instance) error,
	work func(before, after store.Instance) error,
) (store.Instance, error) {
	var before, after store.Instance
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		before, err = lookup(s, r, tx, store.Instances, r.path.Get("instance"))
		return err
	})
	if err != nil {
		return before, err
	}
	defer s.locks.Lock(before.ID)()
	err = s.store.Update(func(tx *store.Tx) error {
		if before, err = find(tx, store.Instances, "", store.Selector{ID: before.ID}); err != nil {
			return err
		}
		after = before
		if err := change(tx, &after); err != nil || after == before {
			return err
		}
		return store.Instances.Put(tx, after)
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
	i, err := s.onInstance(r, func(_ *store.Tx, i *store.Instance) error {
		switch i.RunState {
		case store.RunStopped, store.RunFailed:
			i.Become(store.RunStarting)
		case store.RunStopping:
			return conflict("instance must finish stopping before it can be started")
		case store.StateCreating:
			return errStillCreating
		}
		return nil
	}, func(_, i store.Instance) error {
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
	i, err := s.onInstance(r, func(_ *store.Tx, i *store.Instance) error {
		switch i.RunState {
		case store.RunStarting, store.RunRunning, store.RunRebooting:
			i.Become(store.RunStopping)
		case store.RunFailed:
			i.Become(store.RunStopped)
		case store.StateCreating:
			return errStillCreating
		}
		return nil
	}, func(before, i store.Instance) error {
		if !before.Active() {
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
	i, err := s.onInstance(r, func(_ *store.Tx, i *store.Instance) error {
		switch i.RunState {
		case store.RunRunning, store.RunStarting, store.RunRebooting:
			i.Become(store.RunRebooting)
		case store.StateCreating:
			return errStillCreating
		case store.RunStopping:
			return invalidRequest("cannot reboot an instance in state %s", i.RunState)
		default:
			return invalidRequest("cannot reboot an instance in state %s with no VMM", i.RunState)
		}
		return nil
	}, func(_, i store.Instance) error {
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
func (s *Server) failInstance(i store.Instance, cause error) {
	s.log.Error("an instance has failed", slog.String("instance", i.ID),
		slog.String("error", cause.Error()))
	i.Become(store.RunFailed)
	if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
		s.log.Error("an instance is stuck", slog.String("instance", i.ID),
			slog.String("error", err.Error()))
	}
}

// settleLater ends a transition after its delay. One that the server does not live to see ends
// when the directory is next served.
func (s *Server) settleLater(i store.Instance) {
	delay := time.Duration(s.switches.get().InstanceDelay)
	s.background(func() {
		if !wait(s.life, delay) {
			return
		}
		err := s.store.Update(func(tx *store.Tx) error {
			now, ok, err := store.Instances.Get(tx, i.ID)
			if err != nil || !ok || !now.TimeRunStateUpdated.Equal(i.TimeRunStateUpdated.Time) {
				return err // another transition began meanwhile
			}
			now.Become(settled[now.RunState])
			return store.Instances.Put(tx, now)
		})
		if err != nil {
			s.log.Error("an instance is stuck", slog.String("instance", i.ID),
				slog.String("state", i.RunState), slog.String("error", err.Error()))
		}
	})
}

func (s *Server) attachedDisks(i store.Instance) (attached []store.Disk, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		attached, err = tx.DisksOf(i.ID)
		return err
	})
	return attached, err
}

func (s *Server) plugAll(r *request, i store.Instance) error {
	attached, err := s.attachedDisks(i)
	if err != nil {
		return err
	}
	for _, d := range attached {
		unlock := s.locks.Lock(d.ID)
		err := s.plane.Plug(deviceOf(d, i.ID), r.device(s.switches.get().DeviceDelay))
		unlock()
		if err != nil {
			return fmt.Errorf("start with disk %s: %w", d.Name, err)
		}
	}
	return nil
}

func (s *Server) unplugAll(i store.Instance) error {
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
	var i store.Instance
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		i, err = lookup(s, r, tx, store.Instances, r.path.Get("instance"))
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer s.locks.Lock(i.ID)()
	err = s.store.Update(func(tx *store.Tx) error {
		if i, err = find(tx, store.Instances, "", store.Selector{ID: i.ID}); err != nil {
			return err
		}
		switch {
		case i.Active():
			return invalidRequest("cannot delete instance: instance is running or has not yet " +
				"fully stopped")
		case i.RunState != store.RunStopped && i.RunState != store.RunFailed:
			return invalidRequest("instance cannot be deleted in state %q", i.RunState)
		}
		return tx.DeleteInstance(i)
	})
	if err != nil {
		return 0, nil, err
	}
	return http.StatusNoContent, nil, s.plane.RemoveGuest(i.ID)
}

type instanceUpdate struct {
	ncpus             int
	memory            int64
	bootDisk          store.Selector
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
	i, err := s.onInstance(r, func(tx *store.Tx, i *store.Instance) error {
		if err := checkSize(u.ncpus, u.memory); err != nil {
			return err
		}
		if u.jumboFrames {
			return invalidRequest("enable_jumbo_frames may only be set to true when the " +
				"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator")
		}
		resized := u.ncpus != i.NCPUs || u.memory != i.Memory ||
			store.Deref(u.cpuPlatform) != store.Deref(i.CPUPlatform)
		if resized && i.Active() {
			return conflict("instance must be stopped to change CPU or memory")
		}
		boot, err := bootDisk(tx, *i, u.bootDisk)
		if err != nil {
			return err
		}
		if store.Deref(boot) != store.Deref(i.BootDiskID) && i.Active() {
			return conflict("instance must be stopped to set boot disk")
		}
		i.NCPUs, i.Memory, i.BootDiskID = u.ncpus, u.memory, boot
		i.AutoRestartPolicy, i.CPUPlatform = u.autoRestartPolicy, u.cpuPlatform
		i.AutoRestartEnabled = store.Deref(u.autoRestartPolicy) != "never"
		return nil
	}, func(_, _ store.Instance) error { return nil })
	return http.StatusOK, i, err
}

// bootDisk finds the disk that shall be the boot disk; it must be attached already.
func bootDisk(tx *store.Tx, i store.Instance, sel store.Selector) (*string, error) {
	if !sel.Given() {
		return nil, nil
	}
	d, err := find(tx, store.Disks, i.ProjectID, sel)
	if err != nil {
		return nil, err
	}
	if !d.AttachedTo(i.ID) {
		return nil, conflict("boot disk must be attached")
	}
	return &d.ID, nil
}
