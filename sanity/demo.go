package sanity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

// Demo shows the life of one volume: a simulated rack and the driver are started in a temporary
// directory, the volume is born, used on one instance, moved to another, read there and deleted.
// Every step is printed with what it asked of the rack. Nothing is left when Demo returns.
func Demo(ctx context.Context, out io.Writer) (err error) {
	run, err := NewRun(out)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			run.Failed() // who interrupts a demo needs no evidence
		}
		err = errors.Join(err, run.Close())
	}()
	d := &demo{out: out}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.open(ctx, run); err != nil {
		return err
	}
	start, err := d.rack.Ledger(ctx, d.plugins...)
	if err != nil {
		return err
	}
	if err := d.play(ctx); err != nil {
		return err
	}
	return d.settle(ctx, start)
}

// demo is a performance: the rack, and the driver's three processes.
type demo struct {
	out        io.Writer
	rack       *Rack
	controller *Plugin
	nodes      map[string]*Plugin
	plugins    []*Plugin
	volume     *csi.Volume
	published  map[string]string

	// steps have been shown, and the rack's requests up to this one.
	steps, requests int
	// asked is how many requests the steps made.
	asked int
	began time.Time
}

func (d *demo) open(ctx context.Context, run *Run) (err error) {
	if d.rack, err = run.StartRack(ctx, RackOptions{}); err != nil {
		return err
	}
	start := func(options PluginOptions) *Plugin {
		if err != nil {
			return nil
		}
		var plugin *Plugin
		if plugin, err = d.rack.StartPlugin(ctx, options); err == nil {
			d.plugins = append(d.plugins, plugin)
		}
		return plugin
	}
	d.controller = start(PluginOptions{Mode: ModeController})
	d.nodes = map[string]*Plugin{
		"a": start(PluginOptions{Mode: ModeNode, Instance: "a"}),
		"b": start(PluginOptions{Mode: ModeNode, Instance: "b"}),
	}
	if err != nil {
		return err
	}
	d.began = time.Now()
	d.say("\nA simulated rack serves at %s. Its instances are", d.rack.URL)
	for _, instance := range d.rack.Instances {
		d.say("    %s  %s", instance.Name, instance.ID)
	}
	d.say("The driver runs three times: a controller, and a node service in each instance.")
	d.say("Disks are files; devices and mounts are real. All paths are below\n    %s", d.rack.Dir)
	return d.ready(ctx)
}

// ready waits until the controller has seen the rack, so that the first step shows only its own
// requests.
func (d *demo) ready(ctx context.Context) error {
	return await(ctx, startTimeout, func() error {
		probe, err := d.controller.Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !probe.GetReady().GetValue() {
			err = errors.New("the controller is not ready")
		}
		if err != nil {
			return err
		}
		seen, err := d.rack.Admin.Requests(ctx, 0)
		if len(seen) > 0 {
			d.requests = seen[len(seen)-1].Seq
		}
		return err
	})
}

// close stops the processes. What a step that failed left mounted is taken down first.
func (d *demo) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if d.volume != nil {
		for instance := range d.nodes {
			_, err := d.leave(ctx, instance)
			errs = append(errs, err)
		}
	}
	for _, plugin := range d.plugins {
		errs = append(errs, plugin.Stop())
	}
	if d.rack != nil && d.rack.proc != nil {
		errs = append(errs, d.rack.Stop())
	}
	return errors.Join(errs...)
}

// greeting is what the workload writes.
const greeting = "Hello from instance a. This was written before the move.\n"

func (d *demo) play(ctx context.Context) error {
	for _, step := range []struct {
		title string
		do    func(context.Context) (string, error)
	}{
		{"CreateVolume: a disk is born", d.create},
		{"ControllerPublishVolume: it is attached to a", d.attach("a")},
		{"NodeStageVolume on a: found by its serial, proven blank, formatted, mounted", d.stage("a")},
		{"NodePublishVolume on a: shown to a workload", d.publish("a")},
		{"The workload writes", d.write},
		{"NodeUnpublishVolume and NodeUnstageVolume on a: unmounted, all data on the disk",
			func(ctx context.Context) (string, error) { return d.leave(ctx, "a") }},
		{"ControllerUnpublishVolume: it is detached from a", d.detach("a")},
		{"ControllerPublishVolume: it is attached to b", d.attach("b")},
		{"NodeStageVolume on b: found again, and its filesystem is used as it is", d.stage("b")},
		{"NodePublishVolume on b: shown to the workload that moved", d.publish("b")},
		{"The workload reads", d.read},
		{"NodeUnpublishVolume and NodeUnstageVolume on b",
			func(ctx context.Context) (string, error) { return d.leave(ctx, "b") }},
		{"ControllerUnpublishVolume: it is detached from b", d.detach("b")},
		{"DeleteVolume: the disk is gone", d.remove},
	} {
		if err := d.step(ctx, step.title, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	return nil
}

// step does one and prints it: how long it took, what it asked of the rack, what came out.
func (d *demo) step(
	ctx context.Context, title string, do func(context.Context) (string, error),
) error {
	d.steps++
	start := time.Now()
	outcome, err := do(ctx)
	took := time.Since(start)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\n%2d. %s  (%.1f ms)\n", d.steps, title, ms(took))
	requests, err := d.rack.Admin.Requests(ctx, d.requests)
	if err != nil {
		return err
	}
	for _, r := range requests {
		d.requests = r.Seq
		d.asked++
		fmt.Fprintf(d.out, "      rack  %s %s → %d in %.1f ms\n", r.Method, r.Path, r.Status,
			r.DurationMS)
	}
	if outcome != "" {
		fmt.Fprintf(d.out, "      %s\n", strings.ReplaceAll(outcome, d.rack.Dir+"/", ""))
	}
	return nil
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (d *demo) create(ctx context.Context) (string, error) {
	resp, err := d.controller.Controller().CreateVolume(ctx, createRequest("demo"))
	if err != nil {
		return "", err
	}
	d.volume = resp.GetVolume()
	return fmt.Sprintf("volume %s of 1 GiB is the disk named %s", d.volume.GetVolumeId(),
		d.diskName()), nil
}

func (d *demo) diskName() string { return d.volume.GetVolumeContext()["diskName"] }

func (d *demo) attach(instance string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		resp, err := d.controller.Controller().ControllerPublishVolume(ctx,
			publishRequest(d.volume, d.rack.Instance(instance).ID))
		if err != nil {
			return "", err
		}
		d.published = resp.GetPublishContext()
		return "a device with the serial " + d.diskName() + " appears in " + instance, nil
	}
}

func (d *demo) detach(instance string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		_, err := d.controller.Controller().ControllerUnpublishVolume(ctx,
			unpublishRequest(d.volume, d.rack.Instance(instance).ID))
		return "its device is gone from " + instance, err
	}
}

func (d *demo) remove(ctx context.Context) (string, error) {
	_, err := d.controller.Controller().DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: d.volume.GetVolumeId()})
	return "", err
}

func (d *demo) staging(instance string) string {
	return filepath.Join(d.rack.Dir, instance, "staging")
}

func (d *demo) target(instance string) string {
	return filepath.Join(d.rack.Dir, instance, "pod", "data")
}

func (d *demo) stage(instance string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		staging := d.staging(instance)
		if err := os.MkdirAll(staging, 0o750); err != nil {
			return "", err
		}
		_, err := d.nodes[instance].Node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: d.volume.GetVolumeId(), StagingTargetPath: staging,
			VolumeCapability: mounted(), PublishContext: d.published,
			VolumeContext: d.volume.GetVolumeContext(),
		})
		if err != nil {
			return "", err
		}
		return mountedAt(staging)
	}
}

// mountedAt says what is mounted at a path, as the kernel says it.
func mountedAt(path string) (string, error) {
	mounts, err := mountsBelow(path)
	if err == nil && len(mounts) != 1 {
		err = fmt.Errorf("%d mounts at %s", len(mounts), path)
	}
	if err != nil {
		return "", err
	}
	return "mounted: " + mounts[0], nil
}

func (d *demo) publish(instance string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		target := d.target(instance)
		if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
			return "", err
		}
		_, err := d.nodes[instance].Node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: d.volume.GetVolumeId(), StagingTargetPath: d.staging(instance),
			TargetPath: target, VolumeCapability: mounted(), PublishContext: d.published,
			VolumeContext: d.volume.GetVolumeContext(),
		})
		if err != nil {
			return "", err
		}
		return mountedAt(target)
	}
}

func (d *demo) leave(ctx context.Context, instance string) (string, error) {
	node := d.nodes[instance].Node()
	_, err := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: d.volume.GetVolumeId(), TargetPath: d.target(instance),
	})
	if err != nil {
		return "", err
	}
	_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: d.volume.GetVolumeId(), StagingTargetPath: d.staging(instance),
	})
	return "nothing of it is mounted on " + instance, err
}

func (d *demo) write(context.Context) (string, error) {
	path := filepath.Join(d.target("a"), "greeting")
	if err := os.WriteFile(path, []byte(greeting), 0o640); err != nil {
		return "", err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%q into %s, which has %d MiB left", strings.TrimSpace(greeting), path,
		int64(st.Bavail)*st.Bsize/mib), nil
}

func (d *demo) read(context.Context) (string, error) {
	path := filepath.Join(d.target("b"), "greeting")
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if !bytes.Equal(text, []byte(greeting)) {
		return "", fmt.Errorf("%s holds %q, not what was written on a", path, text)
	}
	return fmt.Sprintf("%q from %s", strings.TrimSpace(greeting), path), nil
}

// settle compares the ledger at the end with the one at the start.
func (d *demo) settle(ctx context.Context, start Ledger) error {
	if err := d.rack.Balance(ctx, start, d.plugins...); err != nil {
		return fmt.Errorf("the ledger does not balance: %w", err)
	}
	d.say("\nThe ledger balances: no disk, attachment, loop device, mount, open file or goroutine "+
		"more than before.\n%d steps and %d requests to the rack in %.1f s.",
		d.steps, d.asked, time.Since(d.began).Seconds())
	return nil
}
