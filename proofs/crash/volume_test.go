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

// volume is the orchestrator's knowledge of a volume.
type volume struct {
	*environment
	name, access string
	size         int64
	seed         uint64
	// source is the snapshot from which the volume is made.
	source *snapshot

	requested bool // the driver was asked to create the volume
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
	// These calls were made and not undone. A call may still be in progress when another process
	// of the driver is called.
	attached, staged, published atomic.Bool
}

// snapshot is the orchestrator's knowledge of a snapshot.
type snapshot struct {
	name      string
	requested bool
	id        string
	// pieces and files are the content of the volume at the time of the snapshot.
	pieces int
	files  proof.ForgedFiles
}

// newVolume prepares a volume for the orchestrator. The driver is not called.
func (env *environment) newVolume(name, access string, size int64, seed uint64) (*volume, error) {
	v := &volume{environment: env, name: name, access: access, size: size, seed: seed,
		at: map[string]*placement{}}
	for _, node := range []string{driverA, driverB} {
		dir := filepath.Join(env.plugins[node].Dir, "kubelet", name)
		p := &placement{Placement: harness.Placement{Capability: harness.Access(access),
			Staging: filepath.Join(dir, "globalmount"),
			Target:  filepath.Join(dir, "pod", "mount")}}
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
	v.requested = true
	req := harness.CreateRequest(v.name, harness.Access(v.access))
	req.CapacityRange.RequiredBytes = v.size
	if v.source != nil {
		harness.FromSnapshot(req, v.source.id)
	}
	resp, err := v.plugins[driverA].Controller().CreateVolume(ctx, req)
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
	_, err := v.plugins[driverA].Controller().DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: v.created.GetVolumeId()})
	if err == nil {
		v.requested = false
	}
	return err
}

func (v *volume) attach(ctx context.Context, node string) error {
	p := v.at[node]
	p.attached.Store(true)
	req := harness.PublishRequest(v.created, v.Rack.Instance(node).ID)
	req.VolumeCapability = p.Capability
	resp, err := v.plugins[driverA].Controller().ControllerPublishVolume(ctx, req)
	p.PublishContext = resp.GetPublishContext()
	return err
}

func (v *volume) detach(ctx context.Context, node string) error {
	_, err := v.plugins[driverA].Controller().ControllerUnpublishVolume(ctx,
		harness.UnpublishRequest(v.created, v.Rack.Instance(node).ID))
	if err == nil {
		v.at[node].attached.Store(false)
	}
	return err
}

func (v *volume) stage(ctx context.Context, node string) error {
	v.at[node].staged.Store(true)
	return v.at[node].Stage(ctx, v.driver(ctx, node).Node())
}

func (v *volume) unstage(ctx context.Context, node string) error {
	err := v.at[node].Unstage(ctx, v.driver(ctx, node).Node())
	if err == nil {
		v.at[node].staged.Store(false)
	}
	return err
}

func (v *volume) publish(ctx context.Context, node string) error {
	v.at[node].published.Store(true)
	return v.at[node].Publish(ctx, v.driver(ctx, node).Node())
}

func (v *volume) unpublish(ctx context.Context, node string) error {
	err := v.at[node].Unpublish(ctx, v.driver(ctx, node).Node())
	if err == nil {
		v.at[node].published.Store(false)
	}
	return err
}

func (v *volume) stats(ctx context.Context, node string) error {
	_, err := v.at[node].Stats(ctx, v.driver(ctx, node).Node())
	return err
}

func (v *volume) snapshot(ctx context.Context, sn *snapshot) error {
	sn.requested = true
	resp, err := v.plugins[driverA].Controller().CreateSnapshot(ctx,
		harness.SnapshotRequest(sn.name, v.created.GetVolumeId()))
	if err == nil {
		sn.id, sn.pieces, sn.files = resp.GetSnapshot().GetSnapshotId(), v.pieces, v.files
	}
	return err
}

func (env *environment) deleteSnapshot(ctx context.Context, sn *snapshot) error {
	_, err := env.plugins[driverA].Controller().DeleteSnapshot(ctx,
		&csi.DeleteSnapshotRequest{SnapshotId: sn.id})
	if err == nil {
		sn.requested = false
	}
	return err
}

// data returns the data of the workload on a node.
func (v *volume) data(node string) harness.Data {
	return harness.Data{Rack: v.Rack, Target: v.at[node].Target, Raw: v.access == "block",
		Seed: v.seed, PieceBytes: 256 << 10}
}

// writeAndVerify does the work of a workload. It compares all acknowledged data byte for byte,
// and adds a piece if it may write.
func (v *volume) writeAndVerify(node string) error {
	for n := range v.pieces {
		if err := v.data(node).Verify(n); err != nil {
			return fmt.Errorf("acknowledged data of volume %s are lost: %w", v.name, err)
		}
	}
	if v.files != nil {
		if err := v.forged.Checked(v.files.Check(v.at[node].Target)); err != nil {
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

// verifyReadOnly returns an error unless a write to a read-only volume fails, at the latest
// when it is synced.
func (v *volume) verifyReadOnly(node string) error {
	if v.data(node).Write(v.pieces, true) == nil {
		return fmt.Errorf("volume %s is read-only and was written", v.name)
	}
	return nil
}
