//go:build linux

package concurrency

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	// sharedVolumes are as many volumes at which several callers are; the other callers have one each.
	sharedVolumes, callersPerShared = 7, 8
	// turns is how often a volume moves, and callsPerTurn how many calls a caller makes in
	// each half of a turn.
	turns, callsPerTurn = 2, 6
	// targets is how many targets a volume has on a node.
	targets = 3
)

// lifecycle is a volume with the callers that are at it. Calls of the controller and calls of the
// node alternate, as CSI demands; within a turn every caller picks its calls by chance.
type lifecycle struct {
	env        *environment
	name       string
	capability *csi.VolumeCapability
	callers    []*rand.Rand
	rand       *rand.Rand
	// written is what was last written and where: the volume's id.
	written, writtenOn string
	// filesystems is how many disks of the lifecycle were formatted.
	filesystems int

	mu sync.Mutex
	// guarded by mu: what the last answer to any caller contained
	volume   *csi.Volume
	snapshot string
}

// lifecycles runs the lifecycles of many volumes at the same time, with sixty-four callers.
func (env *environment) lifecycles(round int) {
	var all []*lifecycle
	for at := range sharedVolumes + callers - sharedVolumes*callersPerShared {
		lc := &lifecycle{env: env, name: fmt.Sprintf("lifecycle-%d-%d", round, at), rand: env.newRand()}
		lc.capability = []*csi.VolumeCapability{
			harness.InMode(oneWriter, harness.Mounted("")), harness.InMode(manyWriters,
				harness.Mounted("ext4")), harness.InMode(manyWriters, harness.Raw()),
			harness.InMode(oneWriter, harness.Mounted("xfs")), harness.InMode(manyWriters,
				harness.Mounted("ext3")), harness.InMode(oneWriter, harness.Raw()),
		}[(at+round)%6]
		lc.callers = append(lc.callers, env.newRand())
		for at < sharedVolumes && len(lc.callers) < callersPerShared {
			lc.callers = append(lc.callers, env.newRand())
		}
		all = append(all, lc)
	}
	formats := env.formatted()
	atOnce(len(all), func(at int) { all[at].run(env.t.Context()) })
	made := 0
	for _, lc := range all {
		made += lc.filesystems
	}
	if got := env.formatted() - formats; got != made {
		env.fail("%d disks got their filesystem by %d formats", made, got)
	}
	env.tally.volumes.Add(int64(len(all)))
}

// newRand is a source of chance for one goroutine.
func (env *environment) newRand() *rand.Rand {
	return rand.New(rand.NewPCG(env.proof.Rand().Uint64(), env.proof.Rand().Uint64()))
}

// run runs the lifecycle, from the create to the delete.
func (lc *lifecycle) run(ctx context.Context) {
	for turn := range turns {
		lc.atOnce(func(r *rand.Rand) { lc.callController(ctx, r) })
		p := lc.place(ctx)
		if p == nil {
			return
		}
		lc.atOnce(func(r *rand.Rand) { lc.callNode(ctx, r, p) })
		lc.verifyAndRemove(ctx, p, turn)
		lc.env.detached(ctx, p.Volume.GetVolumeId())
	}
	lc.deleteAll(ctx)
}

// atOnce lets each caller make some calls.
func (lc *lifecycle) atOnce(choice func(*rand.Rand)) {
	atOnce(len(lc.callers), func(caller int) {
		for range callsPerTurn {
			choice(lc.callers[caller])
		}
	})
}

// setVolume keeps the volume of the last answer, and current returns it with the snapshot.
func (lc *lifecycle) setVolume(volume *csi.Volume) {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	lc.volume = volume
}

func (lc *lifecycle) current() (volume *csi.Volume, snapshot string) {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	return lc.volume, lc.snapshot
}

// place creates the volume, attaches it to either node, and repeats both until it is attached: an
// abandoned call may take effect late.
func (lc *lifecycle) place(ctx context.Context) *placement {
	var p *placement
	err := harness.Await(ctx, patience, func() error {
		volume := lc.env.created(ctx, lc.createRequest())
		if volume == nil {
			return nil
		}
		lc.setVolume(volume)
		lc.env.detached(ctx, volume.GetVolumeId())
		node := lc.env.nodes[lc.rand.IntN(len(lc.env.nodes))]
		answer, err := lc.env.controller(lc.rand.IntN(2)).ControllerPublishVolume(ctx,
			lc.publishRequest(volume, node.instance.ID))
		if lc.env.judge("ControllerPublishVolume", err, attaching) {
			p = lc.env.newPlacement(node, volume, answer.GetPublishContext(), lc.capability)
		}
		return err
	})
	if err != nil {
		lc.env.fail("%s cannot be placed: %v", lc.name, err)
	}
	return p
}

// verifyAndRemove stages and publishes the volume, verifies what was written before, and removes
// the volume from the node.
func (lc *lifecycle) verifyAndRemove(ctx context.Context, p *placement, turn int) {
	for i := range targets {
		lc.env.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, p.target(i))
		})
	}
	p.stageAndPublish(ctx)
	if lc.writtenOn == p.Volume.GetVolumeId() {
		p.verify(lc.written)
	} else if !p.block() {
		lc.filesystems++
	}
	lc.writtenOn, lc.written = p.Volume.GetVolumeId(), fmt.Sprintf("%s in turn %d", lc.name, turn)
	p.write(lc.written)
	p.remove(ctx, targets)
}

// deleteAll deletes the volume and its snapshots.
func (lc *lifecycle) deleteAll(ctx context.Context) {
	volume, _ := lc.current()
	lc.env.deleted(ctx, volume.GetVolumeId())
	if left := lc.env.disksOf(ctx, lc.name); len(left) > 0 {
		lc.env.fail("%s is deleted, and the rack has %v", lc.name, left)
	}
	for _, id := range lc.env.snapshotsNamed(ctx, lc.name) {
		lc.env.snapshotDeleted(ctx, id)
	}
}

func (lc *lifecycle) createRequest() *csi.CreateVolumeRequest {
	return harness.CreateRequest(lc.name, lc.capability)
}
