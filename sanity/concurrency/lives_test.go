package concurrency

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	// gangs are as many volumes at which several callers are; the other callers have one each.
	gangs, gangSize = 7, 8
	// turns is how often a volume moves, and whims how many calls a caller makes in each half of a
	// turn.
	turns, whims = 2, 6
	// pods is how many targets a volume has on a node.
	pods = 3
)

// life is a volume with the callers that are at it. The rack's half and the node's half of its life
// alternate, as CSI demands; within a half everybody calls what they like.
type life struct {
	s          *site
	name       string
	capability *csi.VolumeCapability
	callers    []*rand.Rand
	rand       *rand.Rand
	// kept is what was last written and where: the volume's id.
	kept, keptOn string
	// filesystems is how many disks of the life have got one.
	filesystems int

	mu sync.Mutex
	// guarded by mu: what a caller was told last
	volume   *csi.Volume
	snapshot string
}

// lives lets sixty-four callers live the lives of many volumes, all at the same time.
func (s *site) lives(round int) {
	var all []*life
	for at := range gangs + callers - gangs*gangSize {
		l := &life{s: s, name: fmt.Sprintf("life-%d-%d", round, at), rand: s.chance()}
		l.capability = []*csi.VolumeCapability{
			mounted("", oneWriter), mounted("ext4", manyWriters), raw(manyWriters),
			mounted("xfs", oneWriter), mounted("ext3", manyWriters), raw(oneWriter),
		}[(at+round)%6]
		l.callers = append(l.callers, s.chance())
		for at < gangs && len(l.callers) < gangSize {
			l.callers = append(l.callers, s.chance())
		}
		all = append(all, l)
	}
	formats := s.formatted()
	atOnce(len(all), func(at int) { all[at].live(s.t.Context()) })
	made := 0
	for _, l := range all {
		made += l.filesystems
	}
	if got := s.formatted() - formats; got != made {
		s.wrong("%d disks got their filesystem by %d formats", made, got)
	}
	s.tally.volumes.Add(int64(len(all)))
}

// chance is a source of chance for one goroutine.
func (s *site) chance() *rand.Rand {
	return rand.New(rand.NewPCG(s.proof.Rand().Uint64(), s.proof.Rand().Uint64()))
}

// live is the life, from nothing to nothing.
func (l *life) live(ctx context.Context) {
	for turn := range turns {
		l.everybody(func(r *rand.Rand) { l.rackWhim(ctx, r) })
		p := l.placed(ctx)
		if p == nil {
			return
		}
		l.everybody(func(r *rand.Rand) { l.nodeWhim(ctx, r, p) })
		l.settled(ctx, p, turn)
		l.s.detached(ctx, p.volume.GetVolumeId())
	}
	l.buried(ctx)
}

// everybody lets each caller do as they like for a while.
func (l *life) everybody(whim func(*rand.Rand)) {
	atOnce(len(l.callers), func(caller int) {
		for range whims {
			whim(l.callers[caller])
		}
	})
}

// said notes what a caller was told, and told is what somebody was told last.
func (l *life) said(volume *csi.Volume) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.volume = volume
}

func (l *life) told() (volume *csi.Volume, snapshot string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.volume, l.snapshot
}

// placed makes the volume, attaches it to either node, and repeats both until that is so: what a
// caller gave up may come true late.
func (l *life) placed(ctx context.Context) *place {
	var p *place
	err := await(ctx, func() error {
		volume := l.s.created(ctx, l.order())
		if volume == nil {
			return nil
		}
		l.said(volume)
		l.s.detached(ctx, volume.GetVolumeId())
		node := l.s.nodes[l.rand.IntN(len(l.s.nodes))]
		answer, err := l.s.client(l.rand.IntN(2)).ControllerPublishVolume(ctx,
			l.publishRequest(volume, node.instance.ID))
		if l.s.judge("ControllerPublishVolume", err, attaching) {
			p = l.s.newPlace(node, volume, answer.GetPublishContext(), l.capability)
		}
		return err
	})
	if err != nil {
		l.s.wrong("%s cannot be placed: %v", l.name, err)
	}
	return p
}

// settled brings the volume into order on its node, looks for what was written there before, and
// takes it from the node.
func (l *life) settled(ctx context.Context, p *place, turn int) {
	for i := range pods {
		l.s.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, p.target(i))
		})
	}
	p.settle(ctx)
	if l.keptOn == p.volume.GetVolumeId() {
		p.holds(l.kept)
	} else if !p.block() {
		l.filesystems++
	}
	l.keptOn, l.kept = p.volume.GetVolumeId(), fmt.Sprintf("%s in turn %d", l.name, turn)
	p.keep(l.kept)
	p.leave(ctx, pods)
}

// buried takes away what is left of the life.
func (l *life) buried(ctx context.Context) {
	volume, _ := l.told()
	l.s.deleted(ctx, volume.GetVolumeId())
	if left := l.s.disksOf(ctx, l.name); len(left) > 0 {
		l.s.wrong("%s is deleted, and the rack has %v", l.name, left)
	}
	for _, id := range l.s.snapshotsNamed(ctx, l.name) {
		l.s.snapshotDeleted(ctx, id)
	}
}

func (l *life) order() *csi.CreateVolumeRequest {
	req := createRequest(l.name, gib)
	req.VolumeCapabilities = []*csi.VolumeCapability{l.capability}
	return req
}
