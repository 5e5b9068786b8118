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
	// sharedVolumes is the number of volumes on which several callers work. Each of the other
	// callers has a volume of its own.
	sharedVolumes, callersPerShared = 7, 8
	// turns is how often a volume moves to a node. callsPerTurn is the number of calls that a
	// caller makes in each half of a turn.
	turns, callsPerTurn = 2, 6
	// targets is the number of targets that a volume has on a node.
	targets = 3
)

// lifecycle is a volume with its callers. Calls of the controller and calls of the node
// alternate, as CSI demands. Within a turn every caller chooses its calls at random.
type lifecycle struct {
	env        *environment
	name       string
	capability *csi.VolumeCapability
	callers    []*rand.Rand
	rand       *rand.Rand
	// written is the seed of the data that were written last, and writtenOn the ID of their volume.
	written   uint64
	writtenOn string
	// filesystems is the number of disks of the lifecycle that were formatted.
	filesystems int

	mu sync.Mutex
	// mu guards the fields below, which contain the last answer to any caller.
	volume   *csi.Volume
	snapshot string
}

// lifecycles runs the lifecycles of many volumes at the same time, with 64 callers.
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
	harness.AtOnce(len(all), func(at int) { all[at].run(env.t.Context()) })
	made := 0
	for _, lc := range all {
		made += lc.filesystems
	}
	if got := env.formatted() - formats; got != made {
		env.fail("%d disks got their filesystem by %d formats", made, got)
	}
	env.tally.volumes.Add(int64(len(all)))
}

// newRand returns a source of random numbers for one goroutine.
func (env *environment) newRand() *rand.Rand {
	return rand.New(rand.NewPCG(env.Proof.Rand().Uint64(), env.Proof.Rand().Uint64()))
}

// run runs the lifecycle, from the create to the delete.
func (lc *lifecycle) run(ctx context.Context) {
	for range turns {
		lc.atOnce(func(r *rand.Rand) { lc.callController(ctx, r) })
		p := lc.place(ctx)
		if p == nil {
			return
		}
		lc.atOnce(func(r *rand.Rand) { lc.callNode(ctx, r, p) })
		lc.verifyAndRemove(ctx, p)
		lc.env.detached(ctx, p.Volume.GetVolumeId())
	}
	lc.deleteAll(ctx)
}

// atOnce makes each caller make some calls.
func (lc *lifecycle) atOnce(choice func(*rand.Rand)) {
	harness.AtOnce(len(lc.callers), func(caller int) {
		for range callsPerTurn {
			choice(lc.callers[caller])
		}
	})
}

// setVolume keeps the volume of the last answer. current returns the volume and the snapshot.
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

// place creates the volume and attaches it to one of the nodes. It repeats both until the
// volume is attached, because an abandoned call may take effect late.
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
			lc.publishRequest(volume, node.Instance.ID))
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

// verifyAndRemove stages and publishes the volume, verifies the text that was written before,
// and removes the volume from the node.
func (lc *lifecycle) verifyAndRemove(ctx context.Context, p *placement) {
	for i := range targets {
		lc.env.converge(ctx, "NodeUnpublishVolume", busy, p.unpublish(i))
	}
	p.stageAndPublish(ctx)
	if lc.writtenOn == p.Volume.GetVolumeId() {
		p.verify(lc.written)
	} else if !p.block() {
		lc.filesystems++
	}
	lc.writtenOn, lc.written = p.Volume.GetVolumeId(), lc.rand.Uint64()
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
