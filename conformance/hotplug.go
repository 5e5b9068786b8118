package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
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

// learnHotplug finds out whether the rack attaches a disk to this running instance. The rack has no
// hot-plug if it refuses with the known error and then attaches the same disk to a stopped
// instance. Any other refusal is a failure of attach.
//
// A rack that attaches but does not detach would leave the disk here until this instance stops. So
// the first trial uses an instance that the run creates. Checks of the rules report its failure.
func (w *job) learnHotplug(ctx context.Context) (err error) {
	trial, result := w.rack.TryHotplug(ctx)
	w.exchanges = append(w.exchanges, result.Exchanges...)
	w.behaviours = trial.Says
	if trial.Attaches && !trial.Detaches {
		w.rack.AttachOnly, w.report.Rack.HotPlug = true, report.HotPlugAttachOnly
		return nil
	}
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
		if err := w.learnRemoval(ctx, disk); err != nil {
			return err
		}
		trial, result := w.rack.TryRefusal(ctx)
		w.exchanges = append(w.exchanges, result.Exchanges...)
		w.behaviours = append(w.behaviours, trial.Says...)
		return nil
	}
	if !rules.SaysNotStopped(refused) {
		if now, err := w.look(ctx, disk.Id); err == nil {
			if says := rules.Recorded(refused, now, w.here.Id); says != "" {
				return errAttach{fmt.Errorf("attach: %s", strings.Join(append(w.behaviours, says), "; "))}
			}
		}
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

// These limit how long an instance may take to show the device of an attached disk. A simulated
// rack with an admin listener shows it at once.
const (
	deviceTimeout          = 30 * time.Second
	simulatedDeviceTimeout = 5 * time.Second
)

// learnRemoval waits for the device of the trial's disk. Then it detaches the disk, and measures
// how long a program can still read the device.
func (w *job) learnRemoval(ctx context.Context, disk *oxide.Disk) error {
	serial, timeout := rules.SerialOf(disk.Name), deviceTimeout
	if w.rack.Admin != nil {
		timeout = simulatedDeviceTimeout
	}
	var shown guest.Device
	err := harness.Await(ctx, timeout, func() error {
		devices, err := guest.Devices(w.sysfsRoot)
		if err != nil {
			return err
		}
		var found []string
		for _, d := range devices {
			if d.Serial == serial {
				shown = d
				return nil
			}
			found = append(found, d.Serial)
		}
		return fmt.Errorf("expected a device with the serial %q in this instance; found %q", serial,
			found)
	})
	if err != nil { // the run ends, because every later volume would wait for its device in vain
		return errors.Join(errAttach{fmt.Errorf("attach: the rack attached a disk, but %w", err)},
			briefly("detach the disk of the trial from this instance",
				w.detach(ctx, disk.Id, w.here.Id)))
	}
	device, err := shown.Open(w.devRoot)
	if err != nil {
		return errors.Join(err, w.detach(ctx, disk.Id, w.here.Id))
	}
	defer device.Close()
	began, gone := time.Now(), make(chan time.Duration, 1)
	go func() {
		if last, is := readUntilGone(device, int64(disk.Size), began); is {
			gone <- last
		}
	}()
	if err := w.detach(ctx, disk.Id, w.here.Id); err != nil {
		return briefly("detach the disk of the trial from this instance", err)
	}
	took := time.Since(began)
	select {
	case last := <-gone:
		w.behaviours = append(w.behaviours, fmt.Sprintf("a detach takes a disk from a program that has "+
			"it open: the program could read for %.1f s after the request, which took %.1f s",
			last.Seconds(), took.Seconds()))
	case <-time.After(deviceGrace): // it stays, which a data check reports, or was read
	}
	return nil
}

// deviceGrace is the time after a detach for which a device may still answer reads.
const deviceGrace = 2 * time.Second

// readUntilGone reads uncached blocks of a device until a read fails. It returns the time from
// began to the last read that succeeded. gone is false if all blocks up to size could be read: the
// device may have been readable for longer. A removed device may have the size 0, so EOF is a
// failed read.
func readUntilGone(device io.ReaderAt, size int64, began time.Time) (last time.Duration,
	gone bool) {
	block, pace := make([]byte, 512), time.NewTicker(2*time.Millisecond)
	defer pace.Stop()
	for place := int64(0); place < size; place += harness.MiB / 4 {
		if _, err := device.ReadAt(block, place); err != nil {
			return last, true
		}
		last = time.Since(began)
		<-pace.C
	}
	return last, false
}

// onlyToStopped checks that the rack attaches the disk to a stopped instance, and then refuses
// again to attach it to this running one. A rack that refuses only sometimes has hot-plug.
func (w *job) onlyToStopped(ctx context.Context, disk, stopped, running string,
	refused error) error {
	if err := w.attach(ctx, disk, stopped); err != nil {
		return errAttach{fmt.Errorf("attach: the rack does not attach a disk to this running "+
			"instance, and not to a stopped one either: %s", rules.Brief(err))}
	}
	if err := w.detach(ctx, disk, stopped); err != nil {
		return briefly("detach the disk of the trial from a stopped instance", err)
	}
	again := w.attach(ctx, disk, running)
	switch {
	case again == nil:
		return errAttach{fmt.Errorf("attach: the rack attached a disk to this running instance only "+
			"when it was asked again; at first: %s", rules.Brief(refused))}
	case !rules.SaysNotStopped(again):
		return errAttach{fmt.Errorf("attach: expected that the rack refuses again because this "+
			"instance is not stopped; found %s", rules.Brief(again))}
	}
	return nil
}

func (w *job) attach(ctx context.Context, disk, instance string) error {
	_, err := w.client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func (w *job) look(ctx context.Context, disk string) (*oxide.Disk, error) {
	return w.client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk)})
}

// createDisk creates a blank disk of 1 GiB through the rack's API, without the driver, and checks
// that the answer contains the mark. The disk's name contains the run's ID.
func (w *job) createDisk(ctx context.Context, what string, m mark) (*oxide.Disk, error) {
	disk, err := w.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: w.projectName,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + w.id + "-" + what),
			Description: m.description(), Size: oxide.ByteCount(harness.GiB),
			DiskBackend: harness.BlankBackend()}})
	if errors.Is(err, oxide.ErrObjectAlreadyExists) {
		// A request without an answer may have created the disk.
		disk, err = w.client.DiskView(ctx, oxide.DiskViewParams{Project: w.projectName,
			Disk: oxide.NameOrId("conf-" + w.id + "-" + what)})
	}
	if err == nil && disk.Description != m.description() {
		err = fmt.Errorf("expected the description %q; found %q: nobody could find what the run makes, "+
			"so it makes nothing more; the disk %s is left if it was the run's", m.description(),
			disk.Description, disk.Name)
	}
	return disk, briefly("create a disk", err)
}

// briefly returns an error that names the failed step and contains the rack's refusal on one line.
func briefly(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", step, rules.Brief(err))
}
