package concurrency

import (
	"context"
	"fmt"
	"sync/atomic"

	"google.golang.org/grpc/codes"
)

// callers is how many there are at once.
const callers = 64

var (
	notStaged = answers{codes.FailedPrecondition: {"NotStaged"}}
	// NU-5: a volume that is in use is INTERNAL.
	stillUsed = answers{codes.Internal: {"StillMounted"}}
)

// oneVolume lets everybody at one volume of one node.
func (s *site) oneVolume(round int) {
	ctx := s.t.Context()
	kinds := []string{"ext4", "xfs", "btrfs"}
	volume := s.created(ctx, createRequest(fmt.Sprint("everybodys-", round), gib))
	node := s.nodes[round%len(s.nodes)]
	p := s.newPlace(node, volume, s.attached(ctx, volume, node),
		mounted(kinds[round%len(kinds)], manyWriters))

	formats := s.formatted()
	atOnce(callers, func(int) { s.converge(ctx, "NodeStageVolume", busy, p.stage) })
	s.tally.formats.Add(int64(s.formatted() - formats))
	s.tally.mounts.Add(int64(s.mountsAt(p.staging)))
	p.expect("staged by all", 1, 0)
	p.publishedByAll(ctx)
	p.keep(volume.GetVolumeId())
	filesystem := p.uuid()
	p.unpublishedByAll(ctx)
	p.contradicted(ctx)
	p.tossed(ctx)
	atOnce(callers, func(int) { s.converge(ctx, "NodeUnstageVolume", busy, p.unstage) })
	p.expect("unstaged by all", 0, 0)

	p.settle(ctx)
	p.holds(volume.GetVolumeId())
	if again := p.uuid(); again != filesystem {
		s.wrong("the filesystem was %s and is %s", filesystem, again)
	}
	p.leave(ctx, 1)
	if n := s.formatted() - formats; n != 1 {
		s.wrong("one volume was formatted %d times", n)
	}
	s.detached(ctx, volume.GetVolumeId())
	s.deleted(ctx, volume.GetVolumeId())
}

// publishedByAll shows the volume at one target for half of the callers, and at one of their own
// for the others.
func (p *place) publishedByAll(ctx context.Context) {
	atOnce(callers, func(caller int) {
		p.s.converge(ctx, "NodePublishVolume", busy, func(ctx context.Context) error {
			return p.publish(ctx, p.target(caller/2*(caller%2)))
		})
	})
	for i := range callers / 2 {
		if got := p.s.mountsAt(p.target(i)); got != 1 {
			p.s.wrong("%d mounts at the target %s, want 1", got, p.target(i))
		}
	}
	p.s.tally.mounts.Add(int64(p.s.mountsAt(p.target(0))))
}

func (p *place) unpublishedByAll(ctx context.Context) {
	atOnce(callers, func(caller int) {
		p.s.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, p.target(caller/2))
		})
	})
	for i := range callers / 2 {
		if got := p.s.mountsAt(p.target(i)); got != 0 {
			p.s.wrong("%d mounts at the target %s after it was unpublished", got, p.target(i))
		}
	}
}

// contradicted has half of the callers unstage the volume while the other half publish it: either
// may come first, but then the others must not be told that theirs is done too.
func (p *place) contradicted(ctx context.Context) {
	for range 8 {
		p.s.converge(ctx, "NodeStageVolume", busy, p.stage)
		p.expect("before unstage and publish", 1, 0)
		var unstaged, published atomic.Int64
		atOnce(callers, func(caller int) {
			if caller%2 == 0 {
				if p.s.judge("NodeUnstageVolume", p.unstage(ctx), busy.and(stillUsed)) {
					unstaged.Add(1)
				}
			} else if p.s.judge("NodePublishVolume", p.publish(ctx, p.target(0)),
				busy.and(notStaged)) {
				published.Add(1)
			}
		})
		switch {
		case unstaged.Load() > 0 && published.Load() > 0:
			p.s.wrong("%d callers were told that the volume is unstaged, and %d that it is "+
				"published", unstaged.Load(), published.Load())
		case unstaged.Load() > 0:
			p.expect("unstaged before it was published", 0, 0)
		case published.Load() > 0:
			p.expect("published before it was unstaged", 1, 1)
		default:
			p.s.wrong("of all the callers none came first")
		}
		p.s.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, p.target(0))
		})
	}
	p.s.converge(ctx, "NodeStageVolume", busy, p.stage)
}

// tossed has all four calls made at once: whatever came last, there is at most one mount at each
// path, and none at the target without one at the staging path.
func (p *place) tossed(ctx context.Context) {
	allowed := busy.and(notStaged).and(stillUsed)
	for range 8 {
		atOnce(callers, func(caller int) {
			call := []func(context.Context) error{
				p.stage, p.unstage,
				func(ctx context.Context) error { return p.publish(ctx, p.target(0)) },
				func(ctx context.Context) error { return p.unpublish(ctx, p.target(0)) },
			}[caller%4]
			p.s.judge("a node's call among others", call(ctx), allowed)
		})
		staged, shown := p.s.mountsAt(p.staging), p.s.mountsAt(p.target(0))
		if staged > 1 || shown > staged {
			p.s.wrong("%d mounts at the staging path and %d at the target", staged, shown)
		}
	}
	p.s.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
		return p.unpublish(ctx, p.target(0))
	})
}
