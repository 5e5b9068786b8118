package conformance

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Demo shows the life of one volume. It starts a simulated rack and the driver in a temporary
// directory, creates the volume, uses it on one instance, moves it to another, reads it there and
// deletes it. It prints every step with the step's requests to the rack. If in is not nil, each
// step waits for a line from it. Demo leaves nothing behind.
func Demo(ctx context.Context, in io.Reader, out io.Writer, programs map[string][]string) (
	err error) {
	run, err := harness.NewRun(out)
	if err != nil {
		return err
	}
	run.Programs = programs
	defer func() {
		if err != nil && ctx.Err() == nil {
			run.Failed() // keep the logs, except those of an interrupted demo
		}
		err = errors.Join(err, run.Close())
	}()
	d := &demo{out: out, placements: map[string]*harness.Placement{}}
	if in != nil {
		d.lines = bufio.NewReader(in)
	}
	defer func() { err = errors.Join(err, d.close()) }()
	defer harness.Catch(&err)
	harness.Must(d.open(ctx, run))
	harness.Must(d.draw(ctx, d.run(ctx)))
	harness.Must(harness.Wrap(d.Balance(ctx), "the ledger does not balance"))
	d.say("\nThe ledger balances: no disk, attachment, loop device, mount, open file or goroutine "+
		"more than before.\n%d steps and %d requests to the rack in %.1f s.",
		d.steps, d.requests, time.Since(d.began).Seconds())
	return nil
}

type demo struct {
	*harness.Environment
	out io.Writer
	// lines is the input; each step waits for a line of it. It is nil if the steps do not wait.
	lines      *bufio.Reader
	controller csi.ControllerClient
	nodes      map[string]*harness.Plugin
	volume     *csi.Volume
	// placements has the mount points of the volume on each node where it is mounted.
	placements map[string]*harness.Placement

	// steps and requests count what the demo has printed. lastRequest is the sequence number of the
	// last request to the rack.
	steps, requests, lastRequest int
	began                        time.Time
}

func (d *demo) open(ctx context.Context, run *harness.Run) (err error) {
	defer harness.Catch(&err)
	d.Environment = harness.Got(run.StartEnvironment(ctx, harness.RackOptions{}))
	d.controller = harness.Got(d.StartPlugin(ctx,
		harness.PluginOptions{Mode: harness.ModeController})).Controller()
	d.nodes = harness.Got(d.StartNodes(ctx, harness.PluginOptions{}))
	d.began = time.Now()
	d.Rack.History.Begin()
	d.say("\nA simulated rack serves at %s, and shows itself in a browser at\n    %s/", d.Rack.URL,
		d.Rack.Admin.URL)
	d.say("Its instances are")
	for _, instance := range d.Rack.Instances {
		d.say("    %s  %s", instance.Name, instance.ID)
	}
	d.say("The driver runs three times: a controller, and a node service in each instance.")
	d.say("Disks are files; devices and mounts are real. All paths are below\n    %s", d.Rack.Dir)
	// The requests so far belong to no step.
	before, err := d.Rack.Admin.Requests(ctx, 0)
	if len(before) > 0 {
		d.lastRequest = before[len(before)-1].Seq
	}
	return errors.Join(err, d.TakeBaseline(ctx))
}

func (d *demo) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	for instance, p := range d.placements {
		errs = append(errs, p.Remove(ctx, d.nodes[instance].Node()))
	}
	if d.Environment != nil {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

func (d *demo) run(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	d.step(ctx, "CreateVolume: a disk is created", func() string {
		req := harness.CreateRequest("demo")
		req.Parameters = map[string]string{"csi.storage.k8s.io/pvc/namespace": "demo",
			"csi.storage.k8s.io/pvc/name": "greeting"}
		d.volume = harness.Got(d.controller.CreateVolume(ctx, req)).GetVolume()
		return fmt.Sprintf("volume %s of 1 GiB is the disk named %s", d.volume.GetVolumeId(),
			d.diskName())
	})
	d.place(ctx, "a", "found by its serial, proven blank, formatted, mounted", "a workload")
	const greeting = "Hello from instance a. This was written before the move.\n"
	d.step(ctx, "The workload writes", func() string {
		p := d.placements["a"]
		path := filepath.Join(p.Target, "greeting")
		harness.Must(os.WriteFile(path, []byte(greeting), 0o640))
		stats := harness.Got(p.Stats(ctx, d.nodes["a"].Node()))
		return fmt.Sprintf("%q into %s, which has %d MiB left", strings.TrimSpace(greeting), path,
			stats.GetUsage()[0].GetAvailable()/harness.MiB)
	})
	d.remove(ctx, "a", ": unmounted, all data on the disk")
	d.place(ctx, "b", "found again, and its filesystem is used as it is", "the workload that moved")
	d.step(ctx, "The workload reads", func() string {
		path := filepath.Join(d.placements["b"].Target, "greeting")
		if text := harness.Got(os.ReadFile(path)); string(text) != greeting {
			harness.Must(fmt.Errorf("%s holds %q, not what was written on a", path, text))
		}
		return fmt.Sprintf("%q from %s", strings.TrimSpace(greeting), path)
	})
	d.remove(ctx, "b", "")
	d.step(ctx, "DeleteVolume: the disk is gone", func() string {
		harness.Got(d.controller.DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: d.volume.GetVolumeId()}))
		return ""
	})
	return nil
}

func (d *demo) place(ctx context.Context, instance, staged, workload string) {
	dir := filepath.Join(d.Rack.Dir, instance)
	p := &harness.Placement{Volume: d.volume, Capability: harness.Mounted(""),
		Staging: filepath.Join(dir, "staging"), Target: filepath.Join(dir, "pod", "data")}
	node := d.nodes[instance].Node()
	d.step(ctx, "ControllerPublishVolume: it is attached to "+instance, func() string {
		resp := harness.Got(d.controller.ControllerPublishVolume(ctx,
			harness.PublishRequest(d.volume, d.Rack.Instance(instance).ID)))
		p.PublishContext, d.placements[instance] = resp.GetPublishContext(), p
		harness.Must(p.MakeDirs())
		return "a device with the serial " + d.diskName() + " appears in " + instance
	})
	d.step(ctx, "NodeStageVolume on "+instance+": "+staged, func() string {
		return mountedAt(p.Staging, p.Stage(ctx, node))
	})
	d.step(ctx, "NodePublishVolume on "+instance+": shown to "+workload, func() string {
		return mountedAt(p.Target, p.Publish(ctx, node))
	})
}

func (d *demo) remove(ctx context.Context, instance, unmounted string) {
	d.step(ctx, "NodeUnpublishVolume and NodeUnstageVolume on "+instance+unmounted, func() string {
		harness.Must(d.placements[instance].Remove(ctx, d.nodes[instance].Node()))
		delete(d.placements, instance)
		return "nothing of it is mounted on " + instance
	})
	d.step(ctx, "ControllerUnpublishVolume: it is detached from "+instance, func() string {
		harness.Got(d.controller.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(d.volume, d.Rack.Instance(instance).ID)))
		return "its device is gone from " + instance
	})
}

func (d *demo) diskName() string { return d.volume.GetVolumeContext()["diskName"] }

func mountedAt(path string, err error) string {
	harness.Must(err)
	mounts := harness.Got(harness.MountsBelow(path))
	if len(mounts) != 1 {
		harness.Must(fmt.Errorf("%d mounts at %s", len(mounts), path))
	}
	return "mounted: " + mounts[0]
}

// step runs a step of the demo, and prints its duration, its requests to the rack and its outcome.
// If the step panics with harness.Must, so does this method.
func (d *demo) step(ctx context.Context, title string, do func() (outcome string)) {
	harness.Must(d.pause(ctx, title))
	start := time.Now()
	ended := d.Rack.History.Step(title)
	outcome, err := func() (_ string, err error) {
		defer harness.Catch(&err)
		return do(), nil
	}()
	ended(err)
	took := time.Since(start)
	var requests []adminapi.Request
	if err == nil {
		d.steps++
		d.say("\n%2d. %s  (%.1f ms)", d.steps, title, milliseconds(took))
		requests, err = d.Rack.Admin.Requests(ctx, d.lastRequest)
	}
	if err != nil {
		harness.Must(fmt.Errorf("%s: %w", title, err))
	}
	for _, r := range requests {
		d.lastRequest = r.Seq
		d.requests++
		d.say("      rack  %s %s → %d in %.1f ms", r.Method, r.Path, r.Status, r.DurationMS)
	}
	if outcome != "" {
		d.say("      %s", strings.ReplaceAll(outcome, d.Rack.Dir+"/", ""))
	}
}

func (d *demo) pause(ctx context.Context, title string) error {
	if d.lines == nil {
		return nil
	}
	fmt.Fprintf(d.out, "\nNext: %s\nPress Enter to go on. ", title)
	line, err := readLine(ctx, d.lines)
	if line == "" {
		d.lines = nil // the input has ended, so later steps do not wait
	}
	return err
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

// pictureFile is the environment variable that names the file that draw writes.
const pictureFile = "PICTURE"

// draw writes a page with the volume's history and, if a step failed, the step's error.
func (d *demo) draw(ctx context.Context, broken error) error {
	path := os.Getenv(pictureFile)
	if path == "" || ctx.Err() != nil {
		return broken
	}
	page := history.Page{Title: "The life of a volume", Command: pictureFile + "=FILE make demo",
		At: time.Now()}
	if broken != nil {
		page.Broken, page.Evidence = broken.Error(), d.Rack.Dir
	}
	events, since, dropped := d.Rack.History.Events()
	more, err := harness.Events(ctx, d.Rack, since, d.Plugins...)
	page.Events, page.Dropped = slices.Concat(events, more), dropped
	if err = errors.Join(err, page.WriteFile(path)); err == nil {
		d.say("\nThe life is drawn in %s", path)
	}
	return errors.Join(broken, err)
}
