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
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	gib = harness.GiB
	// quota is the silo's, and diskLimit an instance's.
	quota     = 512 * gib
	diskLimit = 5
	// otherProject is one that the driver is not configured for.
	otherProject = "other"
	// nobody is an ID that nothing has.
	nobody = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"
)

// environment is a rack with a driver, and the objects that every cell finds there. It runs one
// cell at a time.
type environment struct {
	*harness.Environment
	run    *harness.Run
	plugin *harness.Plugin
	conn   *grpc.ClientConn
	ctl    csi.ControllerClient
	// diagnoses are those of all racks.
	diagnoses *doctor
	// request is the last one.
	request proto.Message

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
	// others are the objects that a rack shows in place of the right ones, by kind.
	others map[string]string

	tokenFile string
	tokenTime time.Time
	tokens    int
	names     int
	// baseState is the rack's state when no cell runs.
	baseState rackState
}

// newEnvironment starts a rack and a controller, and creates the objects.
func newEnvironment(ctx context.Context, run *harness.Run, d *doctor) (*environment, error) {
	started, err := run.StartEnvironment(ctx, harness.RackOptions{
		Instances: []string{"up", "down", "full"}, QuotaBytes: quota, DiskLimit: diskLimit,
		// Any token: the cells give the driver new ones.
		Args: []string{"--token=", "--project", otherProject,
			"--image", fmt.Sprintf("sanity/image=%d", gib), "--log-level=error"},
	})
	if err != nil {
		return nil, err
	}
	rack := started.Rack
	env := &environment{Environment: started, run: run, diagnoses: d,
		tokenFile: filepath.Join(rack.Dir, "token"),
		tokenTime: time.Now(), others: map[string]string{}}
	env.up, env.down = rack.Instance("up").ID, rack.Instance("down").ID
	env.full = rack.Instance("full").ID
	env.rotate()
	// Ready, it has looked at its project, and does not do so while a cell runs.
	env.plugin, err = env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController,
		Env: map[string]string{"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": env.tokenFile,
			"OXIDE_MAX_DISKS": strconv.Itoa(diskLimit)}})
	if err != nil {
		return env, err
	}
	env.conn, err = env.plugin.Dial(ctx, grpc.WithChainUnaryInterceptor(env.remember))
	if err != nil {
		return env, err
	}
	env.ctl = csi.NewControllerClient(env.conn)
	s := &setup{environment: env, ctx: ctx}
	env.createObjects(s)
	env.fetchOtherObjects(s)
	if s.err != nil {
		return env, s.err
	}
	if env.baseState, err = readState(ctx, rack.Admin); err != nil {
		return env, err
	}
	return env, env.TakeBaseline(ctx)
}

// createObjects makes what all cells find.
func (env *environment) createObjects(s *setup) {
	env.boot = s.handmade("boot", rackProject, harness.BlankBackend())
	env.byHand = s.handmade("by-hand", rackProject, harness.BlankBackend())
	env.foreignDisk = s.handmade("foreign", otherProject, harness.BlankBackend())
	env.local = s.handmade("local", rackProject, oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}})
	s.attach(env.byHand.Id, env.down)
	s.attach(env.boot.Id, env.down)
	for i := range diskLimit {
		s.attach(s.handmade(fmt.Sprintf("filler-%d", i), rackProject, harness.BlankBackend()).Id,
			env.full)
	}
	s.stop(env.down)
	s.stop(env.full)
	s.bootFrom(env.down, env.boot.Id)
	env.source = s.volume("source")
	env.snap = s.snapshot("snap", env.source.GetVolumeId())
	passing := s.volume("passing")
	env.gone = s.snapshot("gone", passing.GetVolumeId())
	s.delete(passing.GetVolumeId())
	env.foreign = s.handmadeSnapshot("foreign", otherProject, env.foreignDisk.Id)
	images := must(s, func() (*oxide.ImageResultsPage, error) {
		return env.Rack.Client.ImageList(s.ctx, oxide.ImageListParams{Project: rackProject})
	})
	env.image = &images.Items[0]
}

// fetchOtherObjects asks the rack for the objects with which it is going to lie.
func (env *environment) fetchOtherObjects(s *setup) {
	stranger := s.volume("stranger")
	alien := s.snapshot("alien", stranger.GetVolumeId())
	for kind, path := range map[string]string{
		"disk":     "/v1/disks/" + stranger.GetVolumeId(),
		"snapshot": "/v1/snapshots/" + alien.GetSnapshotId(),
		"instance": "/v1/instances/" + env.up,
		"image":    "/v1/images/" + env.image.Id,
		"project":  "/v1/projects/" + otherProject,
	} {
		env.others[kind] = must(s, func() (string, error) { return env.fetch(s.ctx, path) })
	}
	// There is one image and one utilization: another image, and no utilization at all.
	env.others["image"] = renamed(env.others["image"])
	env.others["utilization"] = env.others["project"]
}

// fetch is an answer of the rack as it comes.
func (env *environment) fetch(ctx context.Context, path string) (string, error) {
	resp, err := env.Rack.Client.MakeRequest(ctx, oxide.Request{Method: http.MethodGet, Path: path})
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
func (env *environment) other(operation string) string { return env.others[kindOf(operation)] }

// rotate gives the driver a new token in a file that does not look changed, and returns the one
// that the driver still has.
func (env *environment) rotate() (old string) {
	old = fmt.Sprintf("oxide-token-%08d", env.tokens)
	env.tokens++
	err := os.WriteFile(env.tokenFile, fmt.Appendf(nil, "oxide-token-%08d", env.tokens), 0o600)
	if err = errors.Join(err, os.Chtimes(env.tokenFile, env.tokenTime, env.tokenTime)); err != nil {
		panic(err)
	}
	return old
}

// shutDown demands that nothing is left, and stops everything.
func (env *environment) shutDown(ctx context.Context) error {
	var err error
	if env.Baseline != nil {
		err = env.Balance(ctx)
	}
	return errors.Join(err, env.conn.Close(), env.Close())
}

// patience is for what takes milliseconds on an idle machine.
const patience = 30 * time.Second
