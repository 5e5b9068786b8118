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
	"google.golang.org/grpc/status"

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
		{"an empty instance takes the rack's limit (NI-2)", nil, 0, 12, false},
		{"the boot disk takes a place (NI-2)", map[string]string{"nvme0n1": "boot"}, 0, 11, false},
		{"the driver's own disks take none (NI-2)",
			map[string]string{"nvme0n1": "boot", "nvme1n1": own + "f", "nvme4n1": own + "g"}, 0, 11, false},
		{"a disk attached by hand takes one (NI-2)",
			map[string]string{"nvme0n1": "boot", "nvme1n1": "csi-by-hand"}, 0, 10, false},
		{"disks without an NVMe serial take none (NI-2)",
			map[string]string{"vda": "-", "loop0": "-", "nvme0n1": "boot"}, 0, 11, false},
		{"a path below a multipath head counts once (NI-2)",
			map[string]string{"nvme0n1": "boot", "nvme0c0n1": "boot"}, 0, 11, false},
		{"the limit can be set (NI-2)", map[string]string{"nvme0n1": "boot"}, 8, 7, false},
		{"an instance with one place left (NI-2)", map[string]string{"nvme0n1": "boot"}, 2, 1, false},
		{"a full instance reports 1, because 0 means no limit (NI-2)",
			map[string]string{"nvme0n1": "boot"}, 1, 1, true},
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
				t.Fatal("a topology without a setting (NI-3)")
			}
			if (log.Len() > 0) != c.warning {
				t.Fatalf("logged %q", &log)
			}
		})
	}
	t.Run("a static volume that the node knows takes no place, also after a restart (NI-2)",
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
	t.Run("a configured topology is reported (NI-3)", func(t *testing.T) {
		n := &Service{SysfsRoot: guesttest.Sysfs(t, nil), InstanceID: "x", Topology: map[string]string{
			"topology.csi.oxide.computer/rack": "a"}}
		info, err := n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		must(t, err)
		if diff := cmp.Diff(n.Topology, info.GetAccessibleTopology().GetSegments()); diff != "" {
			t.Fatal(diff)
		}
	})
	t.Run("without an identity there is no answer (NI-4)", func(t *testing.T) {
		csitest.Want(t, csitest.Call(t.Context(), (&Service{SysfsRoot: guesttest.Sysfs(t, nil)}),
			&csi.NodeGetInfoRequest{}), codes.FailedPrecondition, csierr.InstanceUnknown)
	})
}

func TestNodeGetVolumeStats(t *testing.T) {
	stats := func(n *Service, id, path, staging string) ([]*csi.VolumeUsage, error) {
		resp, err := n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id,
			VolumePath: path, StagingTargetPath: staging})
		return resp.GetUsage(), err
	}
	for _, fsType := range volume.Filesystems {
		t.Run(fsType+" counts bytes and inodes (VS-3)", func(t *testing.T) {
			g := newGuest(t)
			v := g.disk(512, fsType)
			v.up("pod")
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
					b.GetUsed() < guesttest.MiB || b.GetAvailable() <= 0 || b.GetAvailable() > b.GetTotal() {
					t.Fatalf("bytes: %v", b)
				}
				if i := usage[1]; i.GetTotal() < 0 || i.GetUsed() < 0 || i.GetAvailable() < 0 {
					t.Fatalf("inodes: %v", i)
				}
			}
		})
	}
	t.Run("a path of another volume is not found, by a process without records (VS-5)",
		func(t *testing.T) {
			g := newGuest(t)
			v := g.disk(8, volume.Ext4)
			other := g.disk(8, volume.Ext4, "csi-other00000000000")
			must(t, v.stage())
			must(t, other.stage())
			_, err := stats(g.node(), v.ID, other.staging(), v.staging())
			csitest.Want(t, err, codes.NotFound, csierr.VolumeNotAtPath)
		})
	t.Run("a block volume has its size (VS-4)", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		must(t, v.publish("dev"))
		usage, err := stats(v.guest.node(), v.ID, v.guest.path("dev"), "")
		must(t, err)
		if len(usage) != 1 || usage[0].GetTotal() != 8*guesttest.MiB {
			t.Fatalf("usage: %v", usage)
		}
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
	t.Run("the node has to know the volume (NH-2)", func(t *testing.T) {
		n := &Service{SysfsRoot: guesttest.Sysfs(t, nil)}
		csitest.Want(t, csitest.Call(t.Context(), n, &csi.NodeGetVolumeHealthRequest{VolumeId: "v",
			StagingTargetPath: "/no/such/path"}), codes.NotFound, csierr.VolumeUnknownToNode)
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
}

func TestANodeExpandsNothingAndReportsNoStorage(t *testing.T) { // NE-1, NH-3
	n := &Service{}
	err := csitest.Call(t.Context(), n, &csi.NodeExpandVolumeRequest{})
	health, healthErr := n.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, healthErr)
	if status.Code(err) != codes.Unimplemented || len(health.GetBackendHealth()) > 0 {
		t.Errorf("got %v and %v", err, health)
	}
}

func TestInstanceID(t *testing.T) { // NI-1, D-28
	const one, two = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01", "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
	oxide := map[string]string{"sys_vendor": "Oxide\n", "product_name": "OxVM\n",
		"product_serial": one + "\n", "product_uuid": one + "\n"}
	for _, c := range []struct {
		name     string
		explicit string
		metadata string // "-" = no file is named
		dmi      map[string]string
		want     string
		says     []string // what the error has; none means no error
	}{
		{"SMBIOS of an Oxide instance is enough", "", "-", oxide, one, nil},
		{"the variable is enough", two, "-", nil, two, nil},
		{"upper case becomes lower case", strings.ToUpper(one), "-", oxide, one, nil},
		{"the metadata file is enough", "", "A=b\n# c\nOXIDE_INSTANCE_ID=" + two + "\n", nil, two, nil},
		{"a quoted value is taken", "", "OXIDE_INSTANCE_ID=\"" + one + "\"", nil, one, nil},
		{"the file of oxide-instance-metadata is enough", "", "OXIDE_INSTANCE_ID='" + one + "'\n", nil,
			one, nil},
		{"all three may agree", one, "OXIDE_INSTANCE_ID=" + one, oxide, one, nil},
		{"another vendor's serial is not believed", "", "-",
			map[string]string{"sys_vendor": "Dell Inc.\n", "product_serial": one + "\n"}, "",
			[]string{"OXIDE_INSTANCE_ID", "OXIDE_INSTANCE_METADATA_FILE"}},
		{"without any source the error gives advice (NI-4)", "", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID", "OXIDE_INSTANCE_METADATA_FILE"}},
		{"variable and SMBIOS that disagree are both named", two, "-", oxide, "",
			[]string{"OXIDE_INSTANCE_ID", "SMBIOS"}},
		{"file and SMBIOS that disagree are both named", "", "OXIDE_INSTANCE_ID=" + two, oxide, "",
			[]string{"metadata file", "SMBIOS"}},
		{"a variable that is no UUID is named, not shown", "canary", "-", oxide, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"a UUID of another spelling is refused", "{" + one + "}", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"a UUID of zeroes is refused", "00000000-0000-0000-0000-000000000000", "-", nil, "",
			[]string{"OXIDE_INSTANCE_ID"}},
		{"a file without the key is refused (D-67)", "", "canary=1\n", oxide, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "OXIDE_INSTANCE_ID="}},
		{"a file that is missing is refused (D-67)", one, "missing", oxide, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "no such file"}},
		{"a file with two ids is refused", "",
			"OXIDE_INSTANCE_ID=" + one + "\nOXIDE_INSTANCE_ID=" + two + "\n", nil, "",
			[]string{"OXIDE_INSTANCE_METADATA_FILE", "twice"}},
		{"an Oxide instance whose serial is no UUID is refused", "", "-",
			map[string]string{"sys_vendor": "Oxide\n", "product_serial": "canary\n"}, "",
			[]string{"SMBIOS"}},
		{"an Oxide instance whose serial cannot be read is refused", "", "-",
			map[string]string{"sys_vendor": "Oxide\n"}, "", []string{"SMBIOS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			n := Identity{Explicit: c.explicit, SysfsRoot: filepath.Join(dir, "sys")}
			dmi := filepath.Join(n.SysfsRoot, "class/dmi/id")
			must(t, os.MkdirAll(dmi, 0o755))
			for file, text := range c.dmi {
				must(t, os.WriteFile(filepath.Join(dmi, file), []byte(text), 0o400))
			}
			if c.metadata != "-" {
				n.MetadataFile = filepath.Join(dir, "canary.env")
				if c.metadata != "missing" {
					must(t, os.WriteFile(n.MetadataFile, []byte(c.metadata), 0o600))
				}
			}
			got, err := InstanceID(n)
			if got != c.want || (err != nil) != (len(c.says) > 0) {
				t.Fatalf("instanceID = %q, %v, want %q", got, err, c.want)
			}
			for _, word := range c.says {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("the error does not say %q: %v", word, err)
				}
			}
			if err == nil {
				return
			}
			if strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error shows a value: %v", err)
			}
		})
	}
}

// FuzzMetadata checks that a file of any content results in an id that follows the key in the file,
// or in an error that shows none of the content.
func FuzzMetadata(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := parseMetadata(b)
		if (id == "") == (err == nil) || strings.ContainsAny(id, "\n") {
			t.Fatalf("parseMetadata(%q) = %q, %v", b, id, err)
		}
		if err == nil && (!bytes.Contains(b, []byte(id)) || !bytes.Contains(b, []byte(InstanceIDKey))) {
			t.Fatalf("parseMetadata(%q) = %q", b, id)
		}
		more, moreErr := parseMetadata(append(bytes.Clone(b), "\n# a comment\nOTHER=x\n"...))
		if err == nil && (more != id || moreErr != nil) {
			t.Fatalf("with a comment %q becomes %q, %v", id, more, moreErr)
		}
	})
}

// FuzzRecord checks that a valid record of a volume is read as it was written, that a truncated one
// is invalid, and that every id has a file of its own in the state directory.
func FuzzRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, id string) {
		file := recordFile(id)
		if filepath.Base(file) != file || len(file) > 80 || !strings.HasSuffix(file, recordSuffix) ||
			strings.Trim(file, "0123456789abcdef-.json") != "" {
			t.Fatalf("the record of %q is %q", id, file)
		}
		if other := recordFile(id + "x"); other == file {
			t.Fatalf("%q and %q are both kept in %q", id, id+"x", file)
		}
		own := volumeRecord{Version: recordVersion, Volume: strings.ToValidUTF8("v"+id, "?"),
			Instance: instance, Disk: "d", Block: len(b)%2 == 1}
		whole, err := own.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", own, err)
		}
		if len(whole) <= maxRecordBytes {
			if same, err := parseRecord(whole); err != nil || same != own {
				t.Fatalf("%+v becomes %q, and then %+v, %v", own, whole, same, err)
			}
			if r, err := parseRecord(whole[:len(b)%(len(whole)-1)]); err == nil {
				t.Fatalf("%q, truncated, is taken for %+v", whole, r)
			}
		}
		r, err := parseRecord(b)
		if err != nil {
			return
		}
		if r.Version != recordVersion || r.Volume == "" || r.Instance == "" || r.Disk == "" ||
			len(b) > maxRecordBytes {
			t.Fatalf("%q is the record %+v", b, r)
		}
		again, err := r.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", r, err)
		}
		if len(again) > maxRecordBytes {
			return // escapes made it too long to be read again
		}
		if same, err := parseRecord(again); err != nil || same != r {
			t.Fatalf("%+v becomes %q, and then %+v, %v", r, again, same, err)
		}
	})
}
