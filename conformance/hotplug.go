package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// errAttach is a rack that attaches no disks, or only now and then, or that does not show them.
type errAttach struct{ error }

// learnHotplug finds out whether the rack attaches a disk to this running instance. A refusal means
// that it cannot only if it is the one that a rack without hot-plug gives, and if the same disk
// then attaches to a stopped instance; any other refusal is a failure of attach.
func (w *job) learnHotplug(ctx context.Context) (err error) {
	disk, err := w.createDisk(ctx, "hotplug", mark{Run: w.id})
	if err != nil {
		return err
	}
	run := deadRun{id: w.id, mark: mark{Instances: []string{w.here.Id}}}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		now, errLook := w.look(ctx, disk.Id)
		if errLook == nil {
			errLook = w.removeDisk(ctx, run, *now)
		}
		err = errors.Join(err, briefly("remove the disk of the trial", errLook))
	}()
	refused := w.attach(ctx, disk.Id, w.here.Id)
	if refused == nil {
		w.rack.Hotplug, w.report.Rack.HotPlug = true, report.HotPlugYes
		return errors.Join(awaitDevice(ctx, w.sysfsRoot, disk.Name),
			briefly("detach the disk of the trial from this instance",
				w.detach(ctx, disk.Id, w.here.Id)))
	}
	if !saysNotStopped(refused) {
		return errAttach{fmt.Errorf("attach: expected that the rack attaches a disk to this "+
			"instance, or refuses because it is not stopped; found %s", rules.Brief(refused))}
	}
	var stopped *oxide.Instance
	busy, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	if err := rules.Patiently(busy, func(ctx context.Context) (err error) {
		stopped, err = w.rack.StoppedInstance(ctx)
		return err
	}); err != nil {
		return fmt.Errorf("make a stopped instance to attach to: %s", rules.Brief(err))
	}
	run.mark.Instances = append(run.mark.Instances, stopped.Id)
	if err := w.onlyToStopped(ctx, disk.Id, stopped.Id, w.here.Id, refused); err != nil {
		return err
	}
	w.report.Rack.HotPlug = report.HotPlugNo
	return nil
}

// deviceTimeout is how long an instance may take to show the device of a disk that was attached.
const deviceTimeout = 30 * time.Second

// awaitDevice demands that this instance shows the disk: each volume would be waited for otherwise.
func awaitDevice(ctx context.Context, sysfsRoot string, disk oxide.Name) error {
	serial := rules.SerialOf(disk)
	err := harness.Await(ctx, deviceTimeout, func() error {
		devices, err := guest.Devices(sysfsRoot)
		if err != nil {
			return err
		}
		var found []string
		for _, d := range devices {
			if d.Serial == serial {
				return nil
			}
			found = append(found, d.Serial)
		}
		return fmt.Errorf("expected a device with the serial %q in this instance; found %q", serial,
			found)
	})
	if err != nil {
		return errAttach{fmt.Errorf("attach: the rack attached a disk, but %w", err)}
	}
	return nil
}

// onlyToStopped demands that the rack attaches the disk to a stopped instance, and refuses to
// attach it to this running one for a second time. A rack that refuses only at times has hot-plug.
func (o *operator) onlyToStopped(ctx context.Context, disk, stopped, running string,
	refused error) error {
	if err := o.attach(ctx, disk, stopped); err != nil {
		return errAttach{fmt.Errorf("attach: the rack does not attach a disk to this running "+
			"instance, and not to a stopped one either: %s", rules.Brief(err))}
	}
	if err := o.detach(ctx, disk, stopped); err != nil {
		return briefly("detach the disk of the trial from a stopped instance", err)
	}
	again := o.attach(ctx, disk, running)
	switch {
	case again == nil:
		return errAttach{fmt.Errorf("attach: the rack attached a disk to this running instance only "+
			"when it was asked again; at first: %s", rules.Brief(refused))}
	case !saysNotStopped(again):
		return errAttach{fmt.Errorf("attach: expected that the rack refuses again because this "+
			"instance is not stopped; found %s", rules.Brief(again))}
	}
	return nil
}

// tellHotplug says what was found, and puts it into the preflight, which could not try.
func (w *job) tellHotplug() {
	found := pass("yes: a disk was attached to this instance and detached")
	if w.report.Rack.HotPlug == report.HotPlugNo {
		found = warn("What needs it is blocked; the driver says that the instance must be stopped.",
			"no: the rack attached a disk to a stopped instance, and to this one only when it is stopped")
	}
	for i, line := range w.report.Preflight {
		if line.Name == hotplugLine {
			w.report.Preflight[i] = report.Line{Name: line.Name, Status: found.status,
				Found: found.found, Advice: found.advice}
		}
	}
	w.say("\n%-5s %-16s %s", found.status, hotplugLine, found.found)
}

// saysNotStopped recognizes the refusal of a rack without hot-plug (A17, A34).
func saysNotStopped(err error) bool {
	text := rules.Brief(err)
	return errors.Is(err, oxide.ErrInvalidRequest) && errors.Is(err, oxide.ErrHTTP400) &&
		strings.Contains(text, "instance is not fully stopped")
}

func (o *operator) attach(ctx context.Context, disk, instance string) error {
	_, err := o.client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func (o *operator) look(ctx context.Context, disk string) (*oxide.Disk, error) {
	return o.client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk)})
}

// createDisk makes a blank disk of 1 GiB past the driver. The name of the run is in its own.
func (o *operator) createDisk(ctx context.Context, what string, m mark) (*oxide.Disk, error) {
	disk, err := o.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: o.projectName,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + o.id + "-" + what),
			Description: m.description(), Size: oxide.ByteCount(harness.GiB),
			DiskBackend: rules.From(&oxide.DiskSourceBlank{BlockSize: 512})}})
	if errors.Is(err, oxide.ErrObjectAlreadyExists) {
		// By a request that was not answered: the name is the run's own.
		disk, err = o.client.DiskView(ctx, oxide.DiskViewParams{Project: o.projectName,
			Disk: oxide.NameOrId("conf-" + o.id + "-" + what)})
	}
	return disk, briefly("create a disk", err)
}

// briefly names the step that failed, with the rack's refusal in a line.
func briefly(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", step, rules.Brief(err))
}
