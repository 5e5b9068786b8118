package rules

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// fault adds a fault for the next matching request to a simulated rack.
func (c *Check) fault(f adminapi.Fault) {
	f.Times = 1
	id, err := c.Admin.AddFault(c.ctx, f)
	c.must("let the simulated rack fail", err)
	c.cleanup(func(ctx context.Context) error {
		faults, err := c.Admin.Faults(ctx)
		for _, f := range faults {
			if f.ID == id { // a restart may have removed it
				err = c.Admin.RemoveFault(ctx, id)
			}
		}
		return err
	})
}

// Switch changes a switch of a simulated rack, by its JSON name, until the check ends.
func (c *Check) Switch(name string, value any) {
	now, err := c.Admin.Switches(c.ctx)
	c.must("read the simulated rack's switches", err)
	text, err := json.Marshal(now)
	c.must("read the simulated rack's switches", err)
	var before map[string]any
	c.must("read the simulated rack's switches", json.Unmarshal(text, &before))
	c.cleanup(func(ctx context.Context) error {
		return c.Admin.Switch(ctx, map[string]any{name: before[name]})
	})
	c.must("change the simulated rack's "+name, c.Admin.Switch(c.ctx, map[string]any{name: value}))
}

// underway is a request that runs while the check continues.
type underway[T any] struct {
	c      *Check
	what   string
	hold   string
	done   chan struct{}
	answer T
	err    error
	// problems is the number of problems that the check had found before.
	problems int
	// carriedOut, if it is not nil, reports whether the rack has carried out the request, answered
	// or not.
	carriedOut func() bool
}

// begin sends a request that creates an object, and waits until others can see the object before
// its creation has ended. A simulated rack delays the creation until end. The step remove runs at
// the end of the check, whether the object was created or not.
func begin[T any](c *Check, what, hold string, send func() (T, error), seen func() error,
	remove func(context.Context) error) *underway[T] {
	u := &underway[T]{c: c, what: what, hold: hold, done: make(chan struct{}),
		problems: len(c.problems)}
	started := false
	c.cleanup(func(ctx context.Context) error {
		if !started {
			return nil
		}
		<-u.done
		return remove(ctx)
	})
	if c.simulated() {
		c.Switch(hold, "1h")
	}
	started = true
	go func() {
		defer close(u.done)
		u.answer, u.err = send()
	}()
	others := false
	err := harness.Await(c.ctx, patience, func() error {
		if u.over() {
			return nil
		}
		err := seen()
		others = err == nil
		return err
	})
	switch {
	case u.over() && u.err != nil:
		c.must(what, u.err)
	case u.over() && !c.simulated():
		c.notTested("the rack ended it before anybody could look: %s", what)
	case err == nil && !others:
		c.fatalf("%s: expected that others see it being made; found it made before", what)
	}
	c.must(what+": expected that others see it being made", err)
	return u
}

func (u *underway[T]) over() bool {
	select {
	case <-u.done:
		return true
	default:
		return false
	}
}

// meanwhile forgets the problems that the check has found since begin, and ends it, if a real rack
// may have carried out the request by then, even without an answer.
func (u *underway[T]) meanwhile() {
	c := u.c
	if len(c.problems) > u.problems && !c.simulated() &&
		(u.over() || u.carriedOut != nil && u.carriedOut()) {
		c.problems = c.problems[:u.problems]
		c.notTested("the rack ended it before everything could be looked at: %s", u.what)
	}
}

// end makes a simulated rack complete the request, and returns its outcome.
func (u *underway[T]) end() outcome[T] {
	u.meanwhile()
	c := u.c
	if c.simulated() {
		c.must("end the hold of the simulated rack", c.Admin.Switch(c.ctx, map[string]any{u.hold: "0s"}))
	}
	select {
	case <-u.done:
	case <-c.ctx.Done():
		c.must(u.what, c.ctx.Err())
	}
	return asked(u.answer, u.err)(c, u.what)
}

// beginDisk starts to create a disk. The caller gives up when ctx ends.
func (c *Check) beginDisk(ctx context.Context,
	params oxide.DiskCreateParams) *underway[*oxide.Disk] {
	return begin(c, "create a disk", "create_hold", func() (*oxide.Disk, error) {
		return c.Client.DiskCreate(ctx, params)
	}, func() error { return c.viewDisk(string(params.Body.Name)).err },
		func(ctx context.Context) error { return c.removeByName(ctx, params.Body.Name) })
}

func checkAbandonedSaga(c *Check) {
	params := c.blank()
	ctx, giveUp := context.WithCancel(c.ctx)
	defer giveUp()
	creation := c.beginDisk(ctx, params)
	giveUp()
	<-creation.done
	if creation.err == nil {
		c.notTested("the rack answered before its caller could give up")
	}
	if c.simulated() {
		c.must("end the hold", c.Admin.Switch(c.ctx, map[string]any{"create_hold": "0s"}))
	}
	found := "nothing"
	err := harness.Await(c.ctx, patience, func() error {
		disk, err := c.readDisk(c.ctx, string(params.Body.Name))
		if err != nil {
			found = Brief(err)
			return nil
		}
		found = string(disk.State.State())
		if found == "creating" {
			return errors.New("the disk is still being created")
		}
		return nil
	})
	c.must("wait for a disk whose creator gave up", err)
	equal(c, "a disk whose creator gave up", found, "detached")
}

func checkFailedSaga(c *Check) {
	c.needSimulated("a saga that fails halfway cannot be brought about from outside")
	params, before := c.blank(), c.storageUsed()
	c.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind})
	c.createDisk(params).refused(internalError)
	c.checkUndone(params.Body.Name, before)
	if c.Restart == nil || len(c.problems) > 0 {
		return
	}
	instance := c.createInstance(c.newInstance()).must()
	c.Await(instance.Id, oxide.InstanceStateStopped)
	c.Switch("instance_delay", "1h")
	c.start(instance.Id).must()
	cutOff := c.blank()
	ctx, giveUp := context.WithCancel(c.ctx)
	defer giveUp()
	creation := c.beginDisk(ctx, cutOff)
	giveUp() // so that the check has no request without an answer
	<-creation.done
	c.must("restart the rack", c.Restart(c.ctx))
	c.closeIdle() // they lead to the rack that has died
	disk := c.viewDisk(string(cutOff.Body.Name)).must()
	equal(c, "the disk whose creation was open when the rack died", disk.State.State(),
		oxide.DiskStateStateDetached)
	equal(c, "what is provisioned with it", c.storageUsed(), before+GiB)
	c.Await(instance.Id, oxide.InstanceStateRunning)
}

func (c *Check) checkUndone(name oxide.Name, provisioned int64) {
	c.viewDisk(string(name)).refused(unknownName("disk", name))
	equal(c, "what is provisioned afterwards", c.storageUsed(), provisioned)
}
