package data

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
)

// checkNeighbours writes two volumes at once, and deletes a third while they are detached.
func checkNeighbours(ctx context.Context, s *session, access string) error {
	var volumes [3]*volume
	for i := range volumes {
		var err error
		if volumes[i], err = s.create(ctx, access, 1, nil); err != nil {
			return err
		}
	}
	pair, third := volumes[:2], volumes[2]
	uses, err := s.allInUse(ctx, pair)
	if err != nil {
		return err
	}
	var together errgroup.Group
	for _, u := range uses {
		together.Go(func() error { return u.writeAll(ctx, 1, false) })
	}
	if err := together.Wait(); err != nil {
		return err
	}
	for _, u := range uses {
		if err := u.leave(ctx); err != nil {
			return err
		}
	}
	if err := s.delete(ctx, third); err != nil {
		return err
	}
	if uses, err = s.allInUse(ctx, pair); err != nil {
		return err
	}
	for _, u := range uses {
		if err := u.verifyAll(ctx, 1); err != nil {
			return fmt.Errorf("after two volumes were written at once, and a third deleted: %w", err)
		}
	}
	return nil
}

// allInUse attaches the volumes to this instance before it mounts the first.
func (s *session) allInUse(ctx context.Context, volumes []*volume) ([]*use, error) {
	var uses []*use
	for _, v := range volumes {
		u, err := s.attach(ctx, v, s.A)
		if err != nil {
			return nil, err
		}
		uses = append(uses, u)
	}
	for _, u := range uses {
		if err := u.mount(ctx); err != nil {
			return nil, err
		}
	}
	return uses, nil
}

// writtenAndDeleted makes a raw volume, writes it and deletes it.
func (s *session) writtenAndDeleted(ctx context.Context) (*volume, error) {
	v, err := s.create(ctx, "block", 1, nil)
	if err != nil {
		return nil, err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return nil, err
	}
	if err := u.writeAll(ctx, 1, true); err != nil {
		return nil, err
	}
	if err := u.leave(ctx); err != nil {
		return nil, err
	}
	return v, s.delete(ctx, v)
}

// checkBlank reads all of a new volume, after another was written and deleted.
func checkBlank(ctx context.Context, s *session) error {
	old, err := s.writtenAndDeleted(ctx)
	if err != nil {
		return err
	}
	v, err := s.create(ctx, "block", 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	scan, err := u.scan(ctx)
	if err == nil && scan.NonZero > 0 {
		err = fmt.Errorf("the new volume %s is not zero: %d of its blocks hold something, the first at "+
			"%s (a volume with seed %d was deleted before)", v.name, scan.NonZero, scan.First, old.seed)
	}
	return err
}

// checkWhole compares the checksums of a whole device, of which both halves and the last block are
// written.
func checkWhole(ctx context.Context, s *session) error {
	v, err := s.create(ctx, "block", 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	if err := u.writeAll(ctx, 1, true); err != nil {
		return err
	}
	before, err := u.scan(ctx)
	if err != nil {
		return err
	}
	if err := u.leave(ctx); err != nil {
		return err
	}
	if u, err = s.inUse(ctx, v, s.A); err != nil {
		return err
	}
	after, err := u.scan(ctx)
	if err == nil && before != after {
		err = fmt.Errorf("volume %s is another after detaching and attaching: it had the SHA-256 %s, "+
			"%d blocks were not zero; it has %s and %d", v.name, before.SHA256, before.NonZero,
			after.SHA256, after.NonZero)
	}
	if err == nil {
		err = u.verifyAll(ctx, 1)
	}
	return err
}

// scan reads all of a device, which has to have the volume's size.
func (u *use) scan(ctx context.Context) (guest.Scan, error) {
	scan, err := u.guest.Scan(ctx, u.place())
	if err == nil && scan.Bytes != u.volume.GetCapacityBytes() {
		err = fmt.Errorf("volume %s has %d bytes, %d could be read", u.volume.name,
			u.volume.GetCapacityBytes(), scan.Bytes)
	}
	return scan, err
}
