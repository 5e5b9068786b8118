//go:build linux

package node

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeGetInfo(t *testing.T) { // NI-1, D-4, D-28, B-39, B-40
	const own = "csi-0123456789abcde"
	for _, c := range []struct {
		name    string
		disks   map[string]string
		limit   int
		want    int64
		warning bool
	}{
		{"NI-2 an empty instance takes the rack's limit", nil, 0, 12, false},
		{"NI-2 the boot disk takes a place", map[string]string{"nvme0n1": "boot"}, 0, 11, false},
		{"NI-2 the driver's own disks take none",
			map[string]string{"nvme0n1": "boot", "nvme1n1": own + "f", "nvme4n1": own + "g"}, 0, 11, false},
		{"NI-2 a disk attached by hand takes one",
			map[string]string{"nvme0n1": "boot", "nvme1n1": "csi-by-hand"}, 0, 10, false},
		{"NI-2 disks without an NVMe serial take none",
			map[string]string{"vda": "-", "loop0": "-", "nvme0n1": "boot"}, 0, 11, false},
		{"NI-2 a path below a multipath head counts once",
			map[string]string{"nvme0n1": "boot", "nvme0c0n1": "boot"}, 0, 11, false},
		{"NI-2 the limit can be set", map[string]string{"nvme0n1": "boot"}, 8, 7, false},
		{"NI-2 an instance with one place left", map[string]string{"nvme0n1": "boot"}, 2, 1, false},
		{"NI-2 a full instance says 1, for 0 means no limit", map[string]string{"nvme0n1": "boot"}, 1, 1,
			true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			n := &Service{SysfsRoot: guesttest.Sysfs(t, c.disks),
				InstanceID: "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01",
				MaxDisks:   c.limit, Log: slog.New(slog.NewTextHandler(&log, nil))}
			info, err := n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
			must(t, err)
			if info.GetMaxVolumesPerNode() != c.want || info.GetNodeId() != n.InstanceID {
				t.Fatalf("got %v, want %d volumes", info, c.want)
			}
			if info.GetAccessibleTopology() != nil {
				t.Fatal("NI-3 a topology nobody gave")
			}
			if (log.Len() > 0) != c.warning {
				t.Fatalf("logged %q", &log)
			}
		})
	}
	t.Run("NI-2 a static volume that the node knows takes no place, after a restart too",
		func(t *testing.T) {
			const disk = "made-by-hand-with-a-long-name"
			n := &Service{InstanceID: "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01", StateDir: t.TempDir(),
				SysfsRoot: guesttest.Sysfs(t, map[string]string{"nvme0n1": "boot", "nvme1n1": disk[:20]})}
			room := func(want int64) {
				t.Helper()
				info, err := n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
				must(t, err)
				if got := info.GetMaxVolumesPerNode(); got != want {
					t.Errorf("got room for %d volumes, want %d", got, want)
				}
			}
			room(10)
			must(t, n.records().of(racktest.Disk).save(disk, false, asKnown))
			room(11)
			n = &Service{InstanceID: n.InstanceID, StateDir: n.StateDir, SysfsRoot: n.SysfsRoot}
			must(t, n.OpenState())
			room(11)
			n.records().of(racktest.Disk).delete()
			room(10)
		})
	t.Run("NI-3 a given topology is told", func(t *testing.T) {
		n := &Service{SysfsRoot: guesttest.Sysfs(t, nil), InstanceID: "x", Topology: map[string]string{
			"topology.csi.oxide.computer/rack": "a"}}
		info, err := n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		must(t, err)
		if diff := cmp.Diff(n.Topology, info.GetAccessibleTopology().GetSegments()); diff != "" {
			t.Fatal(diff)
		}
	})
	t.Run("NI-4 without an identity there is no answer", func(t *testing.T) {
		_, err := (&Service{SysfsRoot: guesttest.Sysfs(t, nil)}).NodeGetInfo(t.Context(),
			&csi.NodeGetInfoRequest{})
		csitest.Want(t, err, codes.FailedPrecondition, csierr.InstanceUnknown)
	})
}

func TestNodeGetCapabilities(t *testing.T) {
	t.Run("NC-1 the node declares what it has, and nothing that is gone from CSI", func(t *testing.T) {
		resp, err := (&Service{}).NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
		must(t, err)
		var got []csi.NodeServiceCapability_RPC_Type
		for _, c := range resp.GetCapabilities() {
			got = append(got, c.GetRpc().GetType())
		}
		if diff := cmp.Diff([]csi.NodeServiceCapability_RPC_Type{1, 2, 5, 7, 8}, got); diff != "" {
			t.Fatal(diff)
		}
	})
	t.Run("NE-1 expanding is not implemented", func(t *testing.T) {
		_, err := (&Service{}).NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{})
		if err == nil || !strings.Contains(err.Error(), "Unimplemented") {
			t.Fatal(err)
		}
	})
}

func TestPathsAndIDsThatNoVolumeHasAreInvalid(t *testing.T) {
	const nul = "/a\x00b"
	v := newGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	for name, req := range map[string]proto.Message{
		"NU-1 unstage without a volume": &csi.NodeUnstageVolumeRequest{StagingTargetPath: "/x"},
		"NU-1 unstage without a path":   &csi.NodeUnstageVolumeRequest{VolumeId: "v"},
		"NU-1 unstage a relative path": &csi.NodeUnstageVolumeRequest{VolumeId: "v",
			StagingTargetPath: "x"},
		"UP-1 unpublish without a volume": &csi.NodeUnpublishVolumeRequest{TargetPath: "/x"},
		"UP-1 unpublish without a path":   &csi.NodeUnpublishVolumeRequest{VolumeId: "v"},
		"UP-1 unpublish a relative path": &csi.NodeUnpublishVolumeRequest{VolumeId: "v",
			TargetPath: "x"},
		"VS-1 statistics without a volume": &csi.NodeGetVolumeStatsRequest{VolumePath: "some/path"},
		"VS-1 statistics without a path":   &csi.NodeGetVolumeStatsRequest{VolumeId: "v"},
		"NH-2 health without a volume":     &csi.NodeGetVolumeHealthRequest{},
		"stage at a NUL": csitest.With(v.stageRequest(),
			func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = nul }),
		"unstage at a NUL": &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: nul},
		"publish at a NUL": csitest.With(v.publishRequest("pod"),
			func(r *csi.NodePublishVolumeRequest) { r.TargetPath = nul }),
		"publish from a NUL": csitest.With(v.publishRequest("pod"),
			func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = nul }),
		"unpublish at a NUL":  &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: nul},
		"statistics at a NUL": &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: nul},
		"statistics staged at a NUL": &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID,
			VolumePath: v.staging(), StagingTargetPath: nul},
		"health at a NUL": &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: nul},
		"health staged at a NUL": &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID,
			StagingTargetPath: nul},
	} {
		t.Run(name, func(t *testing.T) {
			reason := csierr.PathInvalid
			if id, ok := req.(interface{ GetVolumeId() string }); !ok || id.GetVolumeId() == "" {
				reason = csierr.VolumeIDMissing
			}
			csitest.Want(t, v.ask(req), codes.InvalidArgument, reason)
		})
	}
}

func TestNodeGetVolumeStats(t *testing.T) {
	stats := func(n *Service, id, path, staging string) ([]*csi.VolumeUsage, error) {
		resp, err := n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id,
			VolumePath: path, StagingTargetPath: staging})
		return resp.GetUsage(), err
	}
	t.Run("VS-2 a relative path shows no volume", func(t *testing.T) {
		_, err := stats(&Service{SysfsRoot: t.TempDir()}, "v", "some/path", "")
		csitest.Want(t, err, codes.NotFound, csierr.VolumeNotAtPath)
	})
	for _, fsType := range volume.Filesystems {
		t.Run("VS-3 a filesystem counts bytes and inodes: "+fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), fsType)
			must(t, v.stage())
			must(t, v.publish("pod"))
			must(t, os.WriteFile(filepath.Join(g.path("pod"), "x"), make([]byte, guesttest.MiB), 0o600))
			guesttest.Run(t, "sync", "--file-system", g.path("pod"))
			for _, path := range []string{g.path("pod"), v.staging()} {
				usage, err := stats(g.node(), v.ID, path, v.staging())
				must(t, err)
				if len(usage) != 2 || usage[0].GetUnit() != csi.VolumeUsage_BYTES ||
					usage[1].GetUnit() != csi.VolumeUsage_INODES {
					t.Fatalf("usage: %v", usage)
				}
				if b := usage[0]; b.GetTotal() < 350*guesttest.MiB || b.GetTotal() > 512*guesttest.MiB ||
					b.GetUsed() < guesttest.MiB ||
					b.GetAvailable() <= 0 || b.GetAvailable() > b.GetTotal() {
					t.Fatalf("bytes: %v", b)
				}
				if i := usage[1]; i.GetTotal() < 0 || i.GetUsed() < 0 || i.GetAvailable() < 0 {
					t.Fatalf("inodes: %v", i)
				}
			}
		})
	}
	t.Run("VS-4 a block volume has its size", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		must(t, v.publish("dev"))
		usage, err := stats(v.guest.node(), v.ID, v.guest.path("dev"), "")
		must(t, err)
		if len(usage) != 1 || usage[0].GetTotal() != 8*guesttest.MiB {
			t.Fatalf("usage: %v", usage)
		}
	})
	t.Run("VS-2 VS-5 a path that does not show this volume is not found", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), volume.Ext4)
		other := g.volume(g.Attach("csi-other00000000000", 8*guesttest.MiB), volume.Ext4)
		n := g.node()
		for _, each := range []testVolume{v, other} {
			must(t, csitest.Call(t.Context(), n, each.stageRequest()))
		}
		must(t, os.Mkdir(g.path("tmp"), 0o755))
		guesttest.Run(t, "mount", "-t", "tmpfs", "none", g.path("tmp"))
		for name, path := range map[string]string{
			"nothing there": g.path("none"), "a plain directory": g.path(""), "the root disk": "/",
			"a tmpfs": g.path("tmp"), "another volume": other.staging(), "another disk": other.disk.Loop,
		} {
			_, err := stats(n, v.ID, path, "")
			if csitest.Want(t, err, codes.NotFound, csierr.VolumeNotAtPath); t.Failed() {
				t.Log(name)
			}
		}
		// A process that knows nothing yet has the staging path to compare with.
		_, err := stats(g.node(), v.ID, other.staging(), v.staging())
		csitest.Want(t, err, codes.NotFound, csierr.VolumeNotAtPath)
	})
}

func TestNodeGetVolumeHealth(t *testing.T) {
	health := func(n *Service, req *csi.NodeGetVolumeHealthRequest) healthEntries {
		t.Helper()
		resp, err := n.NodeGetVolumeHealth(t.Context(), req)
		must(t, err)
		if resp.GetVolumeHealth().GetVolumeId() != req.GetVolumeId() {
			t.Fatalf("another volume's health: %v", resp)
		}
		return resp.GetVolumeHealth().GetHealthStatuses()
	}
	t.Run("NH-2 the node has to know the volume", func(t *testing.T) {
		n := &Service{SysfsRoot: guesttest.Sysfs(t, nil)}
		_, err := n.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "v",
			StagingTargetPath: "/no/such/path"})
		csitest.Want(t, err, codes.NotFound, csierr.VolumeUnknownToNode)
	})
	t.Run("a volume is healthy, then read-only after errors, then without its device",
		func(t *testing.T) {
			v := newGuest(t).disk(8, volume.Ext4)
			n := v.guest.node()
			must(t, csitest.Call(t.Context(), n, v.stageRequest()))
			known := &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID}
			byPath := &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, StagingTargetPath: v.staging()}
			if got := health(n, known); len(got) != 0 {
				t.Fatalf("health: %v", got)
			}
			if got := health(v.guest.node(), byPath); len(got) != 0 {
				t.Fatalf("health: %v", got)
			}
			turnReadOnly(t, v.staging())
			for _, got := range []healthEntries{health(n, known),
				health(v.guest.node(), byPath)} {
				if len(got) != 1 || got[0].GetStatus() != csi.VolumeHealthErrorType_DEGRADED ||
					got[0].GetReason() != string(csierr.FilesystemFailed) {
					t.Fatalf("health: %v", got)
				}
			}
			v.guest.Unplug(v.disk)
			if got := health(n, known); len(got) != 1 ||
				got[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE {
				t.Fatalf("health: %v", got)
			}
		})
	t.Run("NH-3 a node reports nothing of the rack's storage", func(t *testing.T) {
		resp, err := (&Service{}).NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
		if err != nil || len(resp.GetBackendHealth()) != 0 {
			t.Fatalf("%v, %v", resp, err)
		}
	})
}
