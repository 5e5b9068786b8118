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

// errAttach is the error of a rack that attaches no disks, attaches them only sometimes, or does
// not show them to the instance.
type errAttach struct{ error }

// learnHotplug finds out whether the rack attaches a disk to this running instance. A refusal
// means that the rack has no hot-plug only if it is the known refusal of such a rack, and if the
// same disk then attaches to a stopped instance. Any other refusal is a failure of attach.
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

// deviceTimeout limits how long an instance takes to show the device of an attached disk.
const deviceTimeout = 30 * time.Second

// awaitDevice demands that this instance shows the disk. Otherwise every later volume would wait
// for its device in vain.
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

// onlyToStopped demands that the rack attaches the disk to a stopped instance, and refuses a
// second time to attach it to this running one. A rack that refuses only sometimes has hot-plug.
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

// tellHotplug prints the result, and puts it into the preflight, which could not try it.
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

// createDisk creates a blank disk of 1 GiB through the rack's API, without the driver. Its name
// contains the run's ID.
func (o *operator) createDisk(ctx context.Context, what string, m mark) (*oxide.Disk, error) {
	disk, err := o.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: o.projectName,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + o.id + "-" + what),
			Description: m.description(), Size: oxide.ByteCount(harness.GiB),
			DiskBackend: rules.From(&oxide.DiskSourceBlank{BlockSize: 512})}})
	if errors.Is(err, oxide.ErrObjectAlreadyExists) {
		// A request without an answer may have created the disk. Its name belongs to this run.
		disk, err = o.client.DiskView(ctx, oxide.DiskViewParams{Project: o.projectName,
			Disk: oxide.NameOrId("conf-" + o.id + "-" + what)})
	}
	return disk, briefly("create a disk", err)
}

// briefly names the step that failed, with the rack's refusal on one line.
func briefly(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", step, rules.Brief(err))
}
