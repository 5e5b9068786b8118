package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

const (
	gib = int64(1) << 30
	// quota is the silo's, and diskLimit an instance's.
	quota     = 512 * gib
	diskLimit = 5
	// otherProject is one that the driver is not configured for.
	otherProject = "other"
	// nobody is an ID that nothing has.
	nobody = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"
)

// cast is a rack with a driver, and the objects that every cell finds in it. One cell at a time
// plays with it.
type cast struct {
	rack   *harness.Rack
	plugin *harness.Plugin
	ctl    csi.ControllerClient
	ledger harness.Ledger

	// up runs and down is stopped; full is stopped and has as many disks as it can.
	up, down, full string
	// boot is the boot disk of down; byHand is attached to it, and no volume.
	boot, byHand *oxide.Disk
	// source is a volume with a snapshot, snap; gone is a snapshot whose volume is gone.
	source     *csi.Volume
	snap, gone *csi.Snapshot
	// foreign is a snapshot, and foreignDisk a disk, in the other project.
	foreign     *oxide.Snapshot
	foreignDisk *oxide.Disk
	local       *oxide.Disk
	image       *oxide.Image
	// others are the objects that a lying rack shows, by kind.
	others map[string]string

	tokenFile string
	tokenTime time.Time
	tokens    int
	names     int
	// base is the rack when no cell plays.
	base world
}

// newCast raises the curtain.
func newCast(ctx context.Context, run *harness.Run) (*cast, error) {
	rack, err := run.StartRack(ctx, harness.RackOptions{
		Instances: []string{"up", "down", "full"}, QuotaBytes: quota, DiskLimit: diskLimit,
		// Any token: the cells give the driver new ones.
		Args: []string{"--token=", "--project", otherProject,
			"--image", fmt.Sprintf("sanity/image=%d", gib), "--log-level=error"},
	})
	if err != nil {
		return nil, err
	}
	c := &cast{rack: rack, tokenFile: filepath.Join(rack.Dir, "token"), tokenTime: time.Now(),
		others: map[string]string{}}
	c.up, c.down = rack.Instance("up").ID, rack.Instance("down").ID
	c.full = rack.Instance("full").ID
	c.rotate()
	c.plugin, err = rack.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController,
		Env: map[string]string{"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": c.tokenFile,
			"OXIDE_MAX_DISKS": strconv.Itoa(diskLimit)}})
	if err != nil {
		return c, err
	}
	c.ctl = c.plugin.Controller()
	s := &stage{cast: c, ctx: ctx}
	c.furnish(s)
	c.collect(s)
	if s.err != nil {
		return c, s.err
	}
	if err := c.ready(ctx); err != nil {
		return c, err
	}
	if c.base, err = look(ctx, rack.Admin); err != nil {
		return c, err
	}
	c.ledger, err = rack.Ledger(ctx, c.plugin)
	return c, err
}

// furnish makes what all cells find.
func (c *cast) furnish(s *stage) {
	c.boot = s.handmade("boot", rackProject, blank())
	c.byHand = s.handmade("by-hand", rackProject, blank())
	c.foreignDisk = s.handmade("foreign", otherProject, blank())
	c.local = s.handmade("local", rackProject, oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}})
	s.attach(c.byHand.Id, c.down)
	s.attach(c.boot.Id, c.down)
	for i := range diskLimit {
		s.attach(s.handmade(fmt.Sprintf("filler-%d", i), rackProject, blank()).Id, c.full)
	}
	s.stop(c.down)
	s.stop(c.full)
	s.bootFrom(c.down, c.boot.Id)
	c.source = s.volume("source")
	c.snap = s.snapshot("snap", c.source.GetVolumeId())
	passing := s.volume("passing")
	c.gone = s.snapshot("gone", passing.GetVolumeId())
	s.delete(passing.GetVolumeId())
	c.foreign = s.handmadeSnapshot("foreign", otherProject, c.foreignDisk.Id)
	images := must(s, func() (*oxide.ImageResultsPage, error) {
		return c.rack.Client.ImageList(s.ctx, oxide.ImageListParams{Project: rackProject})
	})
	c.image = &images.Items[0]
}

// collect asks the rack for the objects with which it is going to lie.
func (c *cast) collect(s *stage) {
	stranger := s.volume("stranger")
	alien := s.snapshot("alien", stranger.GetVolumeId())
	for kind, path := range map[string]string{
		"disk":     "/v1/disks/" + stranger.GetVolumeId(),
		"snapshot": "/v1/snapshots/" + alien.GetSnapshotId(),
		"instance": "/v1/instances/" + c.up,
		"image":    "/v1/images/" + c.image.Id,
		"project":  "/v1/projects/" + otherProject,
	} {
		c.others[kind] = must(s, func() (string, error) { return c.fetch(s.ctx, path) })
	}
	// There is one image and one utilization: another image, and no utilization at all.
	c.others["image"] = renamed(c.others["image"])
	c.others["utilization"] = c.others["project"]
}

// fetch is an answer of the rack as it comes.
func (c *cast) fetch(ctx context.Context, path string) (string, error) {
	resp, err := c.rack.Client.MakeRequest(ctx, oxide.Request{Method: http.MethodGet, Path: path})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return string(body), err
}

// renamed is an image as another one, and a larger one.
func renamed(object string) string {
	var fields map[string]json.RawMessage
	if json.Unmarshal([]byte(object), &fields) != nil {
		return object
	}
	fields["id"] = json.RawMessage(`"` + nobody + `"`)
	fields["size"] = json.RawMessage(fmt.Sprint(3 * gib))
	return text(fields)
}

// other is the JSON of another object of the kind that an operation answers with. A list is
// answered with an object, too.
func (c *cast) other(operation string) string { return c.others[kindOf(operation)] }

// rotate gives the driver a new token in a file that does not look changed, and returns the one
// that the driver still has.
func (c *cast) rotate() (old string) {
	old = fmt.Sprintf("oxide-token-%08d", c.tokens)
	c.tokens++
	err := os.WriteFile(c.tokenFile, fmt.Appendf(nil, "oxide-token-%08d", c.tokens), 0o600)
	if err = errors.Join(err, os.Chtimes(c.tokenFile, c.tokenTime, c.tokenTime)); err != nil {
		panic(err)
	}
	return old
}

// ready waits until the driver has looked at its project, so that it does not do so meanwhile.
func (c *cast) ready(ctx context.Context) error {
	return await(ctx, func() error {
		probe, err := c.plugin.Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !probe.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// leave demands that nothing is left, and lowers the curtain.
func (c *cast) leave(ctx context.Context) error {
	var errs []error
	if c.ledger != nil {
		errs = append(errs, c.rack.Balance(ctx, c.ledger, c.plugin))
	}
	if c.plugin != nil && c.plugin.Conn != nil {
		errs = append(errs, c.plugin.Stop())
	}
	return errors.Join(append(errs, c.rack.Stop())...)
}

// patience is for what takes milliseconds on an idle machine.
const patience = 30 * time.Second

// await asks until there is no error.
func await(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", patience, err)
		case <-time.After(pause):
		}
	}
}
