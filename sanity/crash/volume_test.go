//go:build linux

package crash_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const gib = int64(1) << 30

// volume is a volume as its CO knows it.
type volume struct {
	*site
	name, access string
	size         int64
	seed         uint64
	// source is the snapshot it is made from.
	source *snapshot

	asked   bool // the driver was asked to make it
	id      string
	context map[string]string
	at      map[string]*place
	// pieces is how many pieces of data a workload has on the disk, acknowledged.
	pieces int
}

// place is a volume on a node.
type place struct {
	staging, target string
	published       map[string]string
	readOnly        bool // for its workload
	// These are the calls that the CO has made and not taken back. A call may still be under way
	// when another process of the driver is asked.
	attached, staged, shown atomic.Bool
}

// snapshot is a snapshot as its CO knows it.
type snapshot struct {
	name  string
	asked bool
	id    string
	// pieces is what its volume held when it was taken.
	pieces int
}

// newVolume prepares the CO's side of a volume.
func (s *site) newVolume(name, access string, size int64, seed uint64) (*volume, error) {
	v := &volume{site: s, name: name, access: access, size: size, seed: seed,
		at: map[string]*place{}}
	for _, node := range []string{driverA, driverB} {
		dir := filepath.Join(s.plugins[node].Dir, "kubelet", name)
		p := &place{staging: filepath.Join(dir, "globalmount"),
			target: filepath.Join(dir, "pod", "mount")}
		v.at[node] = p
		for _, path := range []string{p.staging, filepath.Dir(p.target)} {
			if err := os.MkdirAll(path, 0o750); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}

// forget takes away the CO's own directories, in which nothing may be left.
func (v *volume) forget() error {
	for _, node := range []string{driverA, driverB} {
		p := v.at[node]
		dir := filepath.Dir(p.staging)
		for _, path := range []string{p.staging, filepath.Dir(p.target), dir} {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("after volume %s: %w", v.name, err)
			}
		}
	}
	return nil
}

func (v *volume) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{
			Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		},
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: v.access},
		},
	}
	if v.access == "block" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	}
	return c
}

func (v *volume) create(ctx context.Context) error {
	v.asked = true
	req := &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.size},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
	}
	if v.source != nil {
		req.VolumeContentSource = &csi.VolumeContentSource{
			Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.source.id},
			},
		}
	}
	resp, err := v.plugins[driverA].Controller().CreateVolume(ctx, req)
	if err != nil {
		return err
	}
	v.id, v.context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetVolumeContext()
	if v.source != nil {
		v.pieces = v.source.pieces
	}
	return nil
}

func (v *volume) delete(ctx context.Context) error {
	_, err := v.plugins[driverA].Controller().DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: v.id})
	if err == nil {
		v.asked = false
	}
	return err
}

func (v *volume) attach(ctx context.Context, node string) error {
	p := v.at[node]
	p.attached.Store(true)
	resp, err := v.plugins[driverA].Controller().ControllerPublishVolume(ctx,
		&csi.ControllerPublishVolumeRequest{
			VolumeId: v.id, NodeId: v.rack.Instance(node).ID,
			VolumeCapability: v.capability(), VolumeContext: v.context,
		})
	p.published = resp.GetPublishContext()
	return err
}

func (v *volume) detach(ctx context.Context, node string) error {
	_, err := v.plugins[driverA].Controller().ControllerUnpublishVolume(ctx,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: v.rack.Instance(node).ID})
	if err == nil {
		v.at[node].attached.Store(false)
	}
	return err
}

func (v *volume) stage(ctx context.Context, node string) error {
	p := v.at[node]
	p.staged.Store(true)
	_, err := v.driver(ctx, node).Node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: p.staging, VolumeCapability: v.capability(),
		PublishContext: p.published, VolumeContext: v.context,
	})
	return err
}

func (v *volume) unstage(ctx context.Context, node string) error {
	p := v.at[node]
	_, err := v.driver(ctx, node).Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: p.staging,
	})
	if err == nil {
		p.staged.Store(false)
	}
	return err
}

func (v *volume) show(ctx context.Context, node string) error {
	p := v.at[node]
	p.shown.Store(true)
	_, err := v.driver(ctx, node).Node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: p.staging, TargetPath: p.target,
		VolumeCapability: v.capability(), PublishContext: p.published, VolumeContext: v.context,
		Readonly: p.readOnly,
	})
	return err
}

func (v *volume) hide(ctx context.Context, node string) error {
	p := v.at[node]
	_, err := v.driver(ctx, node).Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: v.id, TargetPath: p.target,
	})
	if err == nil {
		p.shown.Store(false)
	}
	return err
}

func (v *volume) stats(ctx context.Context, node string) error {
	p := v.at[node]
	_, err := v.driver(ctx, node).Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: v.id, VolumePath: p.target, StagingTargetPath: p.staging,
	})
	return err
}

func (v *volume) snapshot(ctx context.Context, sn *snapshot) error {
	sn.asked = true
	resp, err := v.plugins[driverA].Controller().CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: sn.name, SourceVolumeId: v.id,
	})
	if err == nil {
		sn.id, sn.pieces = resp.GetSnapshot().GetSnapshotId(), v.pieces
	}
	return err
}

func (s *site) deleteSnapshot(ctx context.Context, sn *snapshot) error {
	_, err := s.plugins[driverA].Controller().DeleteSnapshot(ctx,
		&csi.DeleteSnapshotRequest{SnapshotId: sn.id})
	if err == nil {
		sn.asked = false
	}
	return err
}

// use is what a workload does: it finds all that was acknowledged, byte for byte, and adds a piece
// where it may.
func (v *volume) use(node string) error {
	for n := range v.pieces {
		if err := v.holds(node, n); err != nil {
			return err
		}
	}
	file, err := v.open(node, v.pieces, os.O_WRONLY|os.O_CREATE)
	if v.at[node].readOnly {
		return v.refused(file)
	}
	if err != nil {
		return err
	}
	_, err = file.Write(v.piece(v.pieces))
	if err == nil {
		err = file.Sync()
	}
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err == nil {
		v.pieces++
	}
	return err
}

// refused demands that a write to a volume that is read-only does not work. There is no file where
// it could not even be opened.
func (v *volume) refused(file *os.File) error {
	if file == nil {
		return nil
	}
	_, writing := file.Write(v.piece(v.pieces))
	syncing, closing := file.Sync(), file.Close()
	if errors.Join(writing, syncing, closing) == nil {
		return fmt.Errorf("volume %s is read-only and was written", v.name)
	}
	return nil
}

const pieceBytes = 256 << 10

// piece is the content of a piece, which no other has.
func (v *volume) piece(n int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprint(v.seed, " ", n))
	data := make([]byte, pieceBytes)
	_, _ = rand.NewChaCha8(key).Read(data)
	return data
}

// open opens a piece's place: a file in a filesystem, a range on a device.
func (v *volume) open(node string, n, flags int) (*os.File, error) {
	target := v.at[node].target
	if v.access != "block" {
		return os.OpenFile(filepath.Join(target, fmt.Sprint("piece-", n)), flags, 0o640)
	}
	file, err := os.OpenFile(target, flags&^os.O_CREATE, 0)
	if err != nil {
		return nil, err
	}
	err = v.rack.Owns(file)
	if err == nil {
		_, err = file.Seek(int64(n)*(64<<20), io.SeekStart)
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

func (v *volume) holds(node string, n int) error {
	file, err := v.open(node, n, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("acknowledged data are lost: %w", err)
	}
	defer file.Close()
	data := make([]byte, pieceBytes)
	if _, err := io.ReadFull(file, data); err != nil {
		return fmt.Errorf("acknowledged data are lost: read piece %d: %w", n, err)
	}
	if !bytes.Equal(data, v.piece(n)) {
		return fmt.Errorf("acknowledged data are lost: piece %d of volume %s is not what was written",
			n, v.name)
	}
	return nil
}
