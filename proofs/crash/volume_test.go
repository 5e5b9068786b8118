//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const gib = harness.GiB

// volume is what the orchestrator knows about a volume.
type volume struct {
	*environment
	name, access string
	size         int64
	seed         uint64
	// source is the snapshot from which the volume is made, or nil.
	source *snapshot

	requested atomic.Bool // the driver was asked to create the volume
	created   *csi.Volume
	at        map[string]*placement
	// pieces is the number of pieces of data that a workload has written and synced. files are the
	// files with forged records.
	pieces int
	files  proof.ForgedFiles
}

// placement is a volume on a node.
type placement struct {
	harness.Placement
	*environment
	node string
	// These calls were made and not undone. The fields are atomic because two processes of the driver
	// may be called at once.
	attached, staged, published atomic.Bool
}

// snapshot is what the orchestrator knows about a snapshot.
type snapshot struct {
	of        *volume
	name      string
	requested atomic.Bool
	id        string
	// pieces and files are the content of the volume at the time of the snapshot.
	pieces int
	files  proof.ForgedFiles
}

// newVolume prepares a volume, which no call has created yet.
func (env *environment) newVolume(name, access string, size int64, seed uint64) (*volume, error) {
	v := &volume{environment: env, name: name, access: access, size: size, seed: seed,
		at: map[string]*placement{}}
	for _, node := range []string{driverA, driverB} {
		dir := env.plugins[node].Kubelet(name)
		p := &placement{environment: env, node: node, Placement: harness.Placement{
			Capability: harness.Access(access), Staging: filepath.Join(dir, "globalmount"),
			Target: filepath.Join(dir, "pod", "mount")}}
		v.at[node] = p
		if err := p.MakeDirs(); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// removeDirs removes the orchestrator's own directories, which must be empty.
func (v *volume) removeDirs() error {
	for _, node := range []string{driverA, driverB} {
		p := v.at[node]
		for _, path := range []string{p.Staging, filepath.Dir(p.Target), filepath.Dir(p.Staging)} {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("after volume %s: %w", v.name, err)
			}
		}
	}
	return nil
}

func (v *volume) create(ctx context.Context) error {
	v.requested.Store(true)
	req := harness.CreateRequest(v.name, harness.Access(v.access))
	req.CapacityRange.RequiredBytes = v.size
	if v.source != nil {
		harness.FromSnapshot(req, v.source.id)
	}
	resp, err := v.controller().CreateVolume(ctx, req)
	if err != nil {
		return err
	}
	v.created = resp.GetVolume()
	for _, p := range v.at {
		p.Volume = v.created
	}
	if v.source != nil {
		v.pieces, v.files = v.source.pieces, v.source.files
	}
	return nil
}

func (v *volume) delete(ctx context.Context) error {
	_, err := v.controller().DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: v.created.GetVolumeId()})
	return undone(&v.requested, err)
}

// undone clears done if a call that undoes another one has succeeded.
func undone(done *atomic.Bool, err error) error {
	if err == nil {
		done.Store(false)
	}
	return err
}

func (p *placement) attach(ctx context.Context) error {
	p.attached.Store(true)
	req := harness.PublishRequest(p.Volume, p.Rack.Instance(p.node).ID)
	req.VolumeCapability = p.Capability
	resp, err := p.controller().ControllerPublishVolume(ctx, req)
	p.PublishContext = resp.GetPublishContext()
	return err
}

func (p *placement) detach(ctx context.Context) error {
	_, err := p.controller().ControllerUnpublishVolume(ctx,
		harness.UnpublishRequest(p.Volume, p.Rack.Instance(p.node).ID))
	return undone(&p.attached, err)
}

func (p *placement) stage(ctx context.Context) error {
	p.staged.Store(true)
	return p.Stage(ctx, p.driver(ctx, p.node))
}

func (p *placement) unstage(ctx context.Context) error {
	return undone(&p.staged, p.Unstage(ctx, p.driver(ctx, p.node)))
}

func (p *placement) publish(ctx context.Context) error {
	p.published.Store(true)
	return p.Publish(ctx, p.driver(ctx, p.node))
}

func (p *placement) unpublish(ctx context.Context) error {
	return undone(&p.published, p.Unpublish(ctx, p.driver(ctx, p.node)))
}

func (p *placement) stats(ctx context.Context) error {
	_, err := p.Stats(ctx, p.driver(ctx, p.node))
	return err
}

func (sn *snapshot) create(ctx context.Context) error {
	sn.requested.Store(true)
	resp, err := sn.of.controller().CreateSnapshot(ctx,
		harness.SnapshotRequest(sn.name, sn.of.created.GetVolumeId()))
	if err == nil {
		sn.id, sn.pieces, sn.files = resp.GetSnapshot().GetSnapshotId(), sn.of.pieces, sn.of.files
	}
	return err
}

func (sn *snapshot) delete(ctx context.Context) error {
	_, err := sn.of.controller().DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: sn.id})
	return undone(&sn.requested, err)
}

// data returns the data of a workload on a node.
func (v *volume) data(node string) harness.Data {
	return harness.Data{Rack: v.Rack, Target: v.at[node].Target, Raw: v.access == "block",
		Seed: v.seed, PieceBytes: 256 << 10}
}

// writeAndVerify acts as a workload: it compares all acknowledged data byte for byte, and writes
// one more piece unless the volume is read-only.
func (v *volume) writeAndVerify(node string) error {
	for n := range v.pieces {
		if err := v.data(node).Verify(n); err != nil {
			return fmt.Errorf("acknowledged data of volume %s are lost: %w", v.name, err)
		}
	}
	if v.files != nil {
		if err := v.Proof.Forged.Checked(v.files.Check(v.at[node].Target)); err != nil {
			return fmt.Errorf("acknowledged data of volume %s are lost: %w", v.name, err)
		}
	}
	if v.at[node].ReadOnly {
		return v.verifyReadOnly(node)
	}
	err := v.data(node).Write(v.pieces, true)
	if err == nil {
		v.pieces++
	}
	if v.files == nil && v.access != "block" {
		err = errors.Join(err, v.forge(node))
	}
	return err
}

// forge writes files with forged records of the volume.
func (v *volume) forge(node string) (err error) {
	v.files, err = proof.Forgery{Volume: v.created.GetVolumeId(),
		Disk: v.created.GetVolumeContext()["diskName"], Filesystem: v.access,
		SizeBytes: v.created.GetCapacityBytes(), NextBytes: 2 * gib,
		Device: proof.DiskFile(v.Rack, v.created.GetVolumeId())}.Write(v.at[node].Target)
	return err
}

// verifyReadOnly returns an error if a write to a read-only volume, with its fsync, succeeds.
func (v *volume) verifyReadOnly(node string) error {
	if v.data(node).Write(v.pieces, true) == nil {
		return fmt.Errorf("volume %s is read-only and was written", v.name)
	}
	return nil
}
