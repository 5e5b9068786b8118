//go:build linux

package concurrency

import (
	"context"
	"fmt"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// callers is the number of callers that call at once.
const callers = 64

var (
	notStaged = answers{codes.FailedPrecondition: {"NotStaged"}}
	// NU-5: the answer for a volume that is in use is INTERNAL.
	stillUsed = answers{codes.Internal: {"StillMounted"}}
)

// oneVolume makes all callers call for one volume on one node.
func (env *environment) oneVolume(round int) {
	ctx := env.t.Context()
	kinds := []string{"ext4", "xfs", "btrfs"}
	volume := env.created(ctx, harness.CreateRequest(fmt.Sprint("everybodys-", round)))
	node := env.nodes[round%len(env.nodes)]
	said := env.attached(ctx, harness.PublishRequest(volume, node.Instance.ID))
	p := env.newPlacement(node, volume, said,
		harness.InMode(manyWriters, harness.Mounted(kinds[round%len(kinds)])))

	formats := env.formatted()
	harness.AtOnce(callers, func(int) { env.converge(ctx, "NodeStageVolume", busy, p.stage) })
	env.tally.formats.Add(int64(env.formatted() - formats))
	env.tally.mounts.Add(int64(env.mountsAt(p.Staging)))
	p.expect("staged by all", 1, 0)
	p.publishedByAll(ctx)
	p.write(1)
	filesystem := p.uuid()
	p.unpublishedByAll(ctx)
	p.unstageAndPublish(ctx)
	p.callsAtOnce(ctx)
	harness.AtOnce(callers, func(int) { env.converge(ctx, "NodeUnstageVolume", busy, p.unstage) })
	p.expect("unstaged by all", 0, 0)

	p.stageAndPublish(ctx)
	p.verify(1)
	if again := p.uuid(); again != filesystem {
		env.fail("the filesystem was %s and is %s", filesystem, again)
	}
	p.remove(ctx, 1)
	if n := env.formatted() - formats; n != 1 {
		env.fail("one volume was formatted %d times", n)
	}
	env.detached(ctx, volume.GetVolumeId())
	env.deleted(ctx, volume.GetVolumeId())
}

// publishedByAll publishes the volume at one target for half of the callers, and at a target
// of its own for each of the others.
func (p *placement) publishedByAll(ctx context.Context) {
	harness.AtOnce(callers, func(caller int) {
		p.env.converge(ctx, "NodePublishVolume", busy, p.publish(caller/2*(caller%2)))
	})
	for i := range callers / 2 {
		if got := p.env.mountsAt(p.target(i)); got != 1 {
			p.env.fail("%d mounts at the target %s, want 1", got, p.target(i))
		}
	}
	p.env.tally.mounts.Add(int64(p.env.mountsAt(p.target(0))))
}

func (p *placement) unpublishedByAll(ctx context.Context) {
	harness.AtOnce(callers, func(caller int) {
		p.env.converge(ctx, "NodeUnpublishVolume", busy, p.unpublish(caller/2))
	})
	for i := range callers / 2 {
		if got := p.env.mountsAt(p.target(i)); got != 0 {
			p.env.fail("%d mounts at the target %s after it was unpublished", got, p.target(i))
		}
	}
}

// unstageAndPublish makes half of the callers unstage the volume while the other half publish
// it. Either half may be first, but then the other half must not succeed.
func (p *placement) unstageAndPublish(ctx context.Context) {
	for range 8 {
		p.env.converge(ctx, "NodeStageVolume", busy, p.stage)
		p.expect("before unstage and publish", 1, 0)
		var unstaged, published atomic.Int64
		harness.AtOnce(callers, func(caller int) {
			if caller%2 == 0 {
				if p.env.judge("NodeUnstageVolume", p.unstage(ctx), busy.and(stillUsed)) {
					unstaged.Add(1)
				}
			} else if p.env.judge("NodePublishVolume", p.publish(0)(ctx),
				busy.and(notStaged)) {
				published.Add(1)
			}
		})
		switch {
		case unstaged.Load() > 0 && published.Load() > 0:
			p.env.fail("%d callers unstaged the volume, and %d "+
				"published", unstaged.Load(), published.Load())
		case unstaged.Load() > 0:
			p.expect("unstaged before it was published", 0, 0)
		case published.Load() > 0:
			p.expect("published before it was unstaged", 1, 1)
		default:
			p.env.fail("of all the callers none came first")
		}
		p.env.converge(ctx, "NodeUnpublishVolume", busy, p.unpublish(0))
	}
	p.env.converge(ctx, "NodeStageVolume", busy, p.stage)
}

// callsAtOnce makes all four calls at once. Whichever comes last, each path must have at most one
// mount, and the target must have none if the staging path has none.
func (p *placement) callsAtOnce(ctx context.Context) {
	allowed := busy.and(notStaged).and(stillUsed)
	for range 8 {
		harness.AtOnce(callers, func(caller int) {
			call := []func(context.Context) error{
				p.stage, p.unstage,
				p.publish(0), p.unpublish(0),
			}[caller%4]
			p.env.judge("a node's call among others", call(ctx), allowed)
		})
		staged, shown := p.env.mountsAt(p.Staging), p.env.mountsAt(p.target(0))
		if staged > 1 || shown > staged {
			p.env.fail("%d mounts at the staging path and %d at the target", staged, shown)
		}
	}
	p.env.converge(ctx, "NodeUnpublishVolume", busy, p.unpublish(0))
}
