package faults_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	gib = harness.GiB
	// quota is the quota of the silo. diskLimit is the number of disks that an instance can have.
	quota     = 512 * gib
	diskLimit = 5
	// otherProject is a project for which the driver is not configured.
	otherProject = "other"
	// nobody is an ID that no object has.
	nobody = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"
)

// environment is a rack with a driver, and the objects that exist before every cell. It runs one
// cell at a time.
type environment struct {
	*harness.Environment
	proof *proof.Proof
	run   *harness.Run
	ctl   csi.ControllerClient

	// up is an instance that runs, and down is one that is stopped. full is stopped and has as
	// many disks as it can have.
	up, down, full string
	// boot is the boot disk of down. byHand is an administrator's disk that is attached to down.
	boot, byHand *oxide.Disk
	// source is a volume, and snap is its snapshot. gone is a snapshot whose volume was deleted.
	source     *csi.Volume
	snap, gone *csi.Snapshot
	// foreign and foreignDisk are a snapshot and a disk in the other project. local is a local disk.
	foreign     *oxide.Snapshot
	foreignDisk *oxide.Disk
	local       *oxide.Disk
	image       *oxide.Image
	// others contains, by kind, the JSON of objects that replace the right ones in answers.
	others map[string]string

	// page is the path of the page of the last failed cell.
	page string

	tokenFile string
	tokenTime time.Time
	tokens    int
	names     int
	// baseState is the state of the rack when no cell runs.
	baseState rackState
}

func newEnvironment(ctx context.Context, p *proof.Proof, run *harness.Run) (env *environment,
	err error) {
	defer harness.Catch(&err)
	started, err := run.StartEnvironment(ctx, harness.RackOptions{
		Instances: []string{"up", "down", "full"}, QuotaBytes: quota, DiskLimit: diskLimit,
		// The rack accepts any token, because the cells give the driver new ones.
		Args: []string{"--token=", "--project", otherProject,
			"--image", fmt.Sprintf("sanity/image=%d", gib), "--log-level=error"},
	})
	if err != nil {
		return nil, err
	}
	rack := started.Rack
	env = &environment{Environment: started, proof: p, run: run,
		tokenFile: filepath.Join(rack.Dir, "token"),
		tokenTime: time.Now(), others: map[string]string{}}
	env.up, env.down = rack.Instance("up").ID, rack.Instance("down").ID
	env.full = rack.Instance("full").ID
	env.rotate()
	// A driver that is ready has read its project, and does not do so while a cell runs.
	env.ctl = harness.Got(env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController,
		Env: map[string]string{"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": env.tokenFile,
			"OXIDE_MAX_DISKS": strconv.Itoa(diskLimit)}})).Controller()
	s := &setup{environment: env, ctx: ctx}
	env.createObjects(s)
	env.fetchOtherObjects(s)
	env.baseState = s.state()
	return env, env.TakeBaseline(ctx)
}

func (env *environment) createObjects(s *setup) {
	env.boot = s.handmade("boot", rackProject)
	env.byHand = s.handmade("by-hand", rackProject)
	env.foreignDisk = s.handmade("foreign", otherProject)
	env.local = harness.Got(env.Rack.Client.DiskCreate(s.ctx, oxide.DiskCreateParams{
		Project: rackProject, Body: &oxide.DiskCreate{Name: "local", Description: "made by hand",
			Size: oxide.ByteCount(gib), DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}}}))
	s.attach(env.byHand.Id, env.down)
	s.attach(env.boot.Id, env.down)
	for i := range diskLimit {
		s.attach(s.handmade(fmt.Sprintf("filler-%d", i), rackProject).Id, env.full)
	}
	harness.Must(env.Rack.StopInstance(s.ctx, env.down))
	harness.Must(env.Rack.StopInstance(s.ctx, env.full))
	s.bootFrom(env.down, env.boot.Id)
	env.source = s.volume("source")
	env.snap = s.snapshot("snap", env.source.GetVolumeId())
	passing := s.volume("passing")
	env.gone = s.snapshot("gone", passing.GetVolumeId())
	harness.Must(env.Rack.DeleteDisk(s.ctx, passing.GetVolumeId()))
	env.foreign = s.handmadeSnapshot("foreign", otherProject, env.foreignDisk.Id)
	env.image = &harness.Got(env.Rack.Client.ImageList(s.ctx,
		oxide.ImageListParams{Project: rackProject})).Items[0]
}

// fetchOtherObjects reads the objects that later replace the right ones in answers.
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
		env.others[kind] = string(harness.Got(env.Rack.Get(s.ctx, path, nil)))
	}
	// The rack has only one image, one utilization and one user.
	env.others["image"] = altered(env.others["image"], func(fields object) {
		fields["id"], fields["size"] = nobody, 3*gib
	})
	env.others["utilization"] = env.others["project"]
	env.others["current"] = text(map[string]string{"silo_id": nobody})
}

// other returns the JSON of another object of the kind that an operation returns or lists.
func (env *environment) other(operation string) string { return env.others[kindOf(operation)] }

// rotate writes a new token to the driver's file, without changing the file's size and time. It
// returns the old token, which the driver still uses.
func (env *environment) rotate() (old string) {
	old = fmt.Sprintf("oxide-token-%08d", env.tokens)
	env.tokens++
	err := os.WriteFile(env.tokenFile, fmt.Appendf(nil, "oxide-token-%08d", env.tokens), 0o600)
	if err = errors.Join(err, os.Chtimes(env.tokenFile, env.tokenTime, env.tokenTime)); err != nil {
		panic(err)
	}
	return old
}

// shutDown stops all processes, and returns an error if something is left.
func (env *environment) shutDown(ctx context.Context) error {
	var err error
	if env.Baseline != nil {
		err = env.Balance(ctx)
	}
	return errors.Join(err, env.Close())
}

// patience limits waits that take milliseconds on an idle machine.
const patience = 30 * time.Second
