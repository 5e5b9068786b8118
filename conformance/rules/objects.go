package rules

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// GiB is the unit of disks' sizes, in bytes.
const GiB = 1 << 30

// name returns a new name. Its first 20 bytes, which a guest shows, are unique.
func (r *TestedRack) name() oxide.Name {
	r.made++
	return oxide.Name(fmt.Sprintf("conf-%s-%05d", r.Mark, r.made))
}

func (r *TestedRack) project() oxide.NameOrId { return oxide.NameOrId(r.Project) }

// beside returns the project for a request that names an object, or "" if which is an object's ID.
func (r *TestedRack) beside(which string) oxide.NameOrId {
	if uuid.Validate(which) == nil {
		return ""
	}
	return r.project()
}

func (r *TestedRack) readDisk(ctx context.Context, which string) (*oxide.Disk, error) {
	return r.Client.DiskView(ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(which), Project: r.beside(which)})
}

func (r *TestedRack) readSnapshot(ctx context.Context, which string) (*oxide.Snapshot, error) {
	return r.Client.SnapshotView(ctx,
		oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(which), Project: r.beside(which)})
}

func (r *TestedRack) readInstance(ctx context.Context, which string) (*oxide.Instance, error) {
	return r.Client.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(which), Project: r.beside(which)})
}

func (c *Check) viewDisk(which string) outcome[*oxide.Disk] {
	return asked(c.readDisk(c.ctx, which))(c, "read disk %s", which)
}

func (c *Check) viewSnapshot(which string) outcome[*oxide.Snapshot] {
	return asked(c.readSnapshot(c.ctx, which))(c, "read snapshot %s", which)
}

func (c *Check) viewInstance(which string) outcome[*oxide.Instance] {
	return asked(c.readInstance(c.ctx, which))(c, "read instance %s", which)
}

func (c *Check) look(id string) *oxide.Disk               { return c.viewDisk(id).must() }
func (c *Check) stateOf(disk string) oxide.DiskStateState { return c.look(disk).State.State() }
func (c *Check) see(id string) *oxide.Instance            { return c.viewInstance(id).must() }

func (c *Check) viewProject(which string) outcome[*oxide.Project] {
	return asked(c.Client.ProjectView(c.ctx,
		oxide.ProjectViewParams{Project: oxide.NameOrId(which)}))(c, "read project %s", which)
}

// blank returns a request for a blank distributed disk of 1 GiB with blocks of 512 bytes.
func (r *TestedRack) blank() oxide.DiskCreateParams {
	return r.diskFrom(oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}})
}

func (r *TestedRack) diskFrom(source oxide.DiskSource) oxide.DiskCreateParams {
	return oxide.DiskCreateParams{Project: r.project(), Body: &oxide.DiskCreate{
		Name: r.name(), Description: r.Description, Size: GiB,
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}}}}
}

func (c *Check) createDisk(params oxide.DiskCreateParams) outcome[*oxide.Disk] {
	made := asked(c.Client.DiskCreate(c.ctx, params))(c, "create disk %s of %d bytes",
		params.Body.Name, params.Body.Size)
	return created(made, c.disks(), params.Body.Name)
}

type kind[T any] struct {
	read   func(ctx context.Context, name string) (T, error)
	remove func(ctx context.Context, id string) error
	// own returns the object's ID, and whether the object has the mark of this run.
	own func(T) (id string, is bool)
}

func (r *TestedRack) disks() kind[*oxide.Disk] {
	return kind[*oxide.Disk]{r.readDisk, r.removeDisk,
		func(d *oxide.Disk) (string, bool) { return d.Id, r.isOwn(d.Description) }}
}

func (r *TestedRack) instances() kind[*oxide.Instance] {
	return kind[*oxide.Instance]{r.readInstance, r.RemoveInstance,
		func(i *oxide.Instance) (string, bool) { return i.Id, r.isOwn(i.Description) }}
}

// created() adds a cleanup step that removes the object, if the request may have created it.
func created[T any](made outcome[T], k kind[T], name oxide.Name) outcome[T] {
	if mayBeDone(made.err) {
		k.removeNamed(made.c, name)
	} else if made.err == nil {
		id, _ := k.own(made.value)
		made.c.cleanup(func(ctx context.Context) error { return k.remove(ctx, id) })
	}
	return made
}

// removeNamed adds a cleanup step for an object whose creation was not confirmed. The step does not
// remove an object that the checks share, or that another run has created.
func (k kind[T]) removeNamed(c *Check, name oxide.Name) {
	c.cleanup(func(ctx context.Context) error {
		made, err := k.read(ctx, string(name))
		if err != nil {
			return gone(err)
		}
		if id, own := k.own(made); own && !c.shares(id) {
			return k.remove(ctx, id)
		}
		return nil
	})
}

// isOwn reports whether this run wrote the description, which the check of A70 may have extended.
func (r *TestedRack) isOwn(description string) bool {
	return strings.HasPrefix(description, strings.TrimSuffix(r.Description, "}"))
}

// mayBeDone reports whether a change may have taken effect although no answer confirms it.
func mayBeDone(err error) bool { return IsUnanswered(err) || leavesOpen(statusOf(err)) }

func leavesOpen(status int) bool {
	return status == http.StatusInternalServerError || MeansBusy(status)
}

// shares reports whether the checks share the object. No check may remove such an object.
func (r *TestedRack) shares(id string) bool {
	return r.stopped != nil && r.stopped.Id == id || r.running != nil && r.running.Id == id ||
		r.runningDisk != nil && r.runningDisk.Id == id
}

func (c *Check) disk() *oxide.Disk {
	made := c.createDisk(c.blank()).must()
	return c.look(made.Id)
}

func (c *Check) deleteDisk(id string) outcome[any] {
	return c.done(c.Client.DiskDelete(c.ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)}),
		"delete disk %s", id)
}

// removeDisk deletes a disk. If necessary, it first detaches the disk or ends its import.
func (r *TestedRack) removeDisk(ctx context.Context, id string) (err error) {
	defer harness.Catch(&err)
	remove := func() error {
		return gone(r.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)}))
	}
	if err := remove(); err == nil || mayBeDone(err) {
		return err
	}
	if uuid.Validate(id) != nil {
		return fmt.Errorf("the rack gave a disk the ID %q, which is no UUID: it is left alone", id)
	}
	disk, err := r.readDisk(ctx, id)
	if err != nil {
		return gone(err)
	}
	if attached, is := disk.State.AsAttached(); is {
		harness.Got(r.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(attached.Instance),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(id)}}))
	}
	harness.Must(r.EndImport(ctx, disk))
	return remove()
}

func (c *Check) snapshot(disk string) outcome[*oxide.Snapshot] {
	return c.takeSnapshot(c.name(), disk)
}

func (c *Check) deleteSnapshot(id string) outcome[any] {
	return c.done(c.Client.SnapshotDelete(c.ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)}), "delete snapshot %s", id)
}

func (r *TestedRack) newInstance() oxide.InstanceCreateParams {
	return oxide.InstanceCreateParams{Project: r.project(), Body: &oxide.InstanceCreate{
		Name: r.name(), Description: r.Description, Hostname: "conformance",
		Ncpus: 1, Memory: GiB, Start: oxide.NewPointer(false),
		NetworkInterfaces: oxide.InstanceNetworkInterfaceAttachment{
			Value: &oxide.InstanceNetworkInterfaceAttachmentNone{}}}}
}

func (c *Check) createInstance(params oxide.InstanceCreateParams) outcome[*oxide.Instance] {
	name := params.Body.Name
	return created(asked(c.Client.InstanceCreate(c.ctx, params))(c, "create instance %s", name),
		c.instances(), name)
}

// RemoveInstance deletes an instance of this run. If necessary, it stops the instance first.
func (r *TestedRack) RemoveInstance(ctx context.Context, id string) error {
	instance := oxide.NameOrId(id)
	remove := func() error {
		return gone(r.Client.InstanceDelete(ctx, oxide.InstanceDeleteParams{Instance: instance}))
	}
	if err := remove(); err == nil || mayBeDone(err) {
		return err
	}
	if _, err := r.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: instance}); err != nil {
		return gone(err)
	}
	if err := r.Await(ctx, id, oxide.InstanceStateStopped); err != nil {
		return gone(err)
	}
	return remove()
}

// StoppedInstance returns a small instance without disks. All checks share it, and none starts it.
func (c *Check) StoppedInstance() *oxide.Instance {
	return asked(c.TestedRack.StoppedInstance(c.ctx))(c, "make a stopped instance").must()
}

// StoppedInstance returns the stopped instance that the checks share. Close removes it.
func (r *TestedRack) StoppedInstance(ctx context.Context) (_ *oxide.Instance, err error) {
	defer harness.Catch(&err)
	if r.stopped == nil {
		r.stopped = harness.Got(r.createShared(ctx, r.newInstance()))
	}
	return r.stopped, r.Await(ctx, r.stopped.Id, oxide.InstanceStateStopped)
}

// createShared creates an instance, or finds it by its name if the creation is not confirmed.
func (r *TestedRack) createShared(ctx context.Context,
	params oxide.InstanceCreateParams) (*oxide.Instance, error) {
	made, err := r.Client.InstanceCreate(ctx, params)
	if mayBeDone(err) {
		found, errView := r.readInstance(ctx, string(params.Body.Name))
		if errView == nil && r.isOwn(found.Description) {
			return found, nil
		}
	}
	return made, err
}

func (c *Check) attach(disk, instance string) outcome[*oxide.Disk] {
	return asked(c.Client.InstanceDiskAttach(c.ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}}))(c,
		"attach disk %s to instance %s", disk, instance)
}

func (c *Check) detach(disk, instance string) outcome[*oxide.Disk] {
	return asked(c.Client.InstanceDiskDetach(c.ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}}))(c,
		"detach disk %s from instance %s", disk, instance)
}

// Await waits until an instance is in the state want, or ends the check.
func (c *Check) Await(instance string, want oxide.InstanceState) {
	c.must(fmt.Sprintf("wait until instance %s is %s", instance, want),
		c.TestedRack.Await(c.ctx, instance, want))
}

// stateTimeout limits the start or stop of an instance. patience limits waits for other changes.
const stateTimeout, patience = 3 * time.Minute, time.Minute

// Await waits until an instance is in the state want. Its pauses grow to a second, because a real
// rack takes many seconds. A failed read ends the wait, because the transport has already repeated
// what may be repeated.
func (r *TestedRack) Await(ctx context.Context, instance string, want oxide.InstanceState) error {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	for backoff := (harness.Backoff{Max: time.Second}); ; {
		seen, err := r.readInstance(ctx, instance)
		if err != nil || seen.RunState == want {
			return err
		}
		if backoff.Wait(ctx) != nil {
			return fmt.Errorf("after %s: instance %s is %s, not %s", stateTimeout, instance,
				seen.RunState, want)
		}
	}
}

func (c *Check) simulated() bool { return c.Admin != nil }

func (c *Check) needSimulated(why string) {
	if !c.simulated() {
		c.notTested("%s", why)
	}
}

// situations is the unit of arrange()'s measures, which Check.run marks as tested at a check's end.
const situations = "situations"

// arrange reports whether the check can create a situation, which needs a simulated rack. If it
// cannot, or if the check ends early, the report says that the situation was not tested.
func (c *Check) arrange(situation string) bool {
	why := "it cannot be brought about from outside"
	if c.simulated() {
		why = "the check ended before"
	}
	c.extent.Look(report.Measure{What: situation, Of: 1, Unit: situations, Words: why})
	return c.simulated()
}

// runningInstance returns a small instance with one disk, which was attached before the start. It
// has no boot disk and no network. All checks share it, and none stops it.
func (c *Check) runningInstance() (*oxide.Instance, *oxide.Disk) {
	if c.runningDisk == nil {
		params := c.blank()
		made, err := c.Client.DiskCreate(c.ctx, params)
		if mayBeDone(err) {
			c.disks().removeNamed(c, params.Body.Name)
		}
		c.runningDisk = asked(made, err)(c, "create a disk").must()
	}
	if c.running == nil {
		create := c.newInstance()
		create.Body.Start = oxide.NewPointer(true)
		create.Body.Disks = []oxide.InstanceDiskAttachment{with(c.runningDisk)}
		c.running = asked(c.createShared(c.ctx, create))(c, "create an instance and start it").must()
		c.Await(c.running.Id, oxide.InstanceStateRunning)
	}
	return c.running, c.runningDisk
}

func with(disk *oxide.Disk) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{
		Value: &oxide.InstanceDiskAttachmentAttach{Name: disk.Name}}
}

func (c *Check) instance(disks ...*oxide.Disk) *oxide.Instance {
	create := c.newInstance()
	for _, disk := range disks {
		create.Body.Disks = append(create.Body.Disks, with(disk))
	}
	instance := c.createInstance(create).must()
	c.Await(instance.Id, oxide.InstanceStateStopped)
	return instance
}

func (c *Check) start(instance string) outcome[*oxide.Instance] {
	return asked(c.Client.InstanceStart(c.ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instance)}))(c, "start instance %s", instance)
}

func (c *Check) stop(instance string) outcome[*oxide.Instance] {
	return asked(c.Client.InstanceStop(c.ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)}))(c, "stop instance %s", instance)
}

func (c *Check) reboot(instance string) outcome[*oxide.Instance] {
	return asked(c.Client.InstanceReboot(c.ctx, oxide.InstanceRebootParams{
		Instance: oxide.NameOrId(instance)}))(c, "reboot instance %s", instance)
}

func (c *Check) startAndAwait(instance string) {
	c.start(instance).must()
	c.Await(instance, oxide.InstanceStateRunning)
}

// fail makes an instance of a simulated rack fail in a reboot. The instance needs a disk.
func (c *Check) fail(instance string) {
	c.startAndAwait(instance)
	c.fault(adminapi.Fault{Operation: "instance_reboot", Object: instance,
		Device: &adminapi.DeviceFault{Fails: true}})
	c.reboot(instance).must()
	c.Await(instance, oxide.InstanceStateFailed)
}

func (c *Check) disksOf(instance string) []oxide.Disk {
	return asked(c.Client.InstanceDiskListAllPages(c.ctx, oxide.InstanceDiskListParams{
		Instance: oxide.NameOrId(instance)}))(c, "list the disks of instance "+instance).must()
}

// attachedTo demands that an answer shows a disk attached to an instance, or detached if instance
// is "".
func attachedTo(answer outcome[*oxide.Disk], instance string) {
	want := "detached"
	if instance != "" {
		want = "attached to instance " + instance
	}
	disk := answer.must()
	got := string(disk.State.State())
	if attached, is := disk.State.AsAttached(); is {
		got += " to instance " + attached.Instance
	}
	equal(answer.c, answer.step+": the disk", got, want)
}

func (c *Check) staysAttached(disk, instance string) {
	attachedTo(c.viewDisk(disk), instance)
}

// Trial describes how a rack attached and detached disks.
type Trial struct {
	Attaches, Detaches bool
	// Says has sentences that an operator can send to Oxide.
	Says []string
}

// TryHotplug detaches a disk of a running instance and, if the rack refuses, attaches another disk.
// It creates an instance for this, because a disk may stay attached until the instance is stopped.
func (r *TestedRack) TryHotplug(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "hot-plug", Check: func(c *Check) {
		t = Trial{}
		first, second := c.disk(), c.disk()
		instance := c.instance(first)
		c.startAndAwait(instance.Id)
		err := c.detach(first.Id, instance.Id).err
		if t.Detaches = err == nil; t.Detaches {
			return
		}
		if !SaysNotStopped(err) {
			c.fatalf("detach a disk of a running instance: expected that the rack does it, or refuses "+
				"because the instance is not stopped; found %s", Brief(err))
		}
		refused := Brief(err)
		err = c.attach(second.Id, instance.Id).err
		if IsUnanswered(err) {
			c.must("attach a disk to a running instance", err)
		}
		if err == nil {
			t.Attaches = true
			t.Says = append(t.Says, "a running instance gains a disk, and keeps it until it is stopped: "+
				refused)
			t.refusal(c, first)
		} else if says := Recorded(err, c.look(second.Id), instance.Id); says != "" {
			t.Says = append(t.Says, says)
		}
	}})
	return t, result
}

// TryRefusal attaches a disk that another instance has, and reports how the rack refuses.
func (r *TestedRack) TryRefusal(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "refusal", Check: func(c *Check) {
		t = Trial{}
		disk := c.disk()
		c.instance(disk)
		t.refusal(c, disk)
	}})
	return t, result
}

func (t *Trial) refusal(c *Check, attached *oxide.Disk) {
	err := c.attach(attached.Id, c.StoppedInstance().Id).err
	if statusOf(err) == http.StatusInternalServerError {
		t.Says = append(t.Says, "a refused attach is a 500 without a reason: the disk "+
			string(attached.Name)+" has another instance, and the answer is "+Brief(err))
	}
}

// SaysNotStopped recognizes the refusal of a rack without hot-plug (A17, A34).
func SaysNotStopped(err error) bool {
	return errors.Is(err, oxide.ErrInvalidRequest) && errors.Is(err, oxide.ErrHTTP400) &&
		strings.Contains(Brief(err), "instance is not fully stopped")
}

// Recorded describes an attach that the rack answered with an error although it shows the disk as
// attached. It returns "" for every other attach.
func Recorded(err error, disk *oxide.Disk, instance string) string {
	attached, is := disk.State.AsAttached()
	if err == nil || IsUnanswered(err) || !is || attached.Instance != instance {
		return ""
	}
	return fmt.Sprintf("an attach that failed stays recorded: the disk %s is attached to the "+
		"instance %s, and the answer was %s", disk.Name, instance, Brief(err))
}
