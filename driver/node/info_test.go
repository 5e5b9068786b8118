//go:build linux

package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeGetInfoReportsTheFreeDiskSlots(t *testing.T) { // NI-1, D-4, D-28, B-39, B-40
	const own, boot = "csi-0123456789abcde", "nvme0n1=boot\n"
	for _, c := range []struct {
		name    string
		disks   string
		limit   int
		want    int64
		warning bool
	}{
		{"an empty instance takes the rack's limit", "", 0, 12, false},
		{"the boot disk takes a slot", boot, 0, 11, false},
		{"own disks take no slot", boot + "nvme1n1=" + own + "f\nnvme4n1=" + own + "g", 0, 11, false},
		{"a disk attached by hand takes a slot", boot + "nvme1n1=csi-by-hand", 0, 10, false},
		{"disks without an NVMe serial take no slot", boot + "vda=-\nloop0=-", 0, 11, false},
		{"a path below a multipath head counts once", boot + "nvme0c0n1=boot", 0, 11, false},
		{"the limit can be set", boot, 8, 7, false},
		{"an instance with one free slot", boot, 2, 1, false},
		{"a full instance reports 1, because 0 means no limit", boot, 1, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			n := &Service{SysfsRoot: guesttest.Sysfs(t, csitest.Pairs(c.disks)), InstanceID: instance,
				MaxDisks: c.limit, Log: slog.New(slog.NewTextHandler(&log, nil))}
			info := csitest.Got(n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}))(t)
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
	t.Run("a static volume takes no slot, even after a restart (NI-2)", func(t *testing.T) {
		const disk = "made-by-hand-with-a-long-name"
		disks := map[string]string{"nvme0n1": "boot", "nvme1n1": disk[:20]}
		n := &Service{InstanceID: instance, StateDir: t.TempDir(), SysfsRoot: guesttest.Sysfs(t, disks)}
		room := func(want int64) {
			t.Helper()
			info := csitest.Got(n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}))(t)
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
		info := csitest.Got(n.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}))(t)
		if diff := cmp.Diff(n.Topology, info.GetAccessibleTopology().GetSegments()); diff != "" {
			t.Fatal(diff)
		}
	})
	t.Run("NodeGetInfo fails without an instance id (NI-4)", func(t *testing.T) {
		csitest.Want(t, csitest.Call(t.Context(), (&Service{SysfsRoot: guesttest.Sysfs(t, nil)}),
			&csi.NodeGetInfoRequest{}), codes.FailedPrecondition, csierr.InstanceUnknown)
	})
}

func (v testVolume) usage(path string) ([]*csi.VolumeUsage, error) {
	resp, err := v.guest.node().NodeGetVolumeStats(v.guest.t.Context(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.staging()})
	return resp.GetUsage(), err
}

func TestStatsReportTheUsageOfAVolume(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType+" counts bytes and inodes (VS-3)", func(t *testing.T) {
			v := newGuest(t).disk(512, fsType)
			v.up("pod")
			pod := v.guest.path("pod")
			must(t, os.WriteFile(filepath.Join(pod, "x"), make([]byte, guesttest.MiB), 0o600))
			guesttest.Run(t, "sync", "--file-system", pod)
			for _, path := range []string{pod, v.staging()} {
				usage := csitest.Got(v.usage(path))(t)
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
	t.Run("another volume's path is NOT_FOUND, even without records (VS-5)", func(t *testing.T) {
		g := newGuest(t)
		v := g.disk(8, volume.Ext4)
		other := g.disk(8, volume.Ext4, "csi-other00000000000")
		must(t, v.stage())
		must(t, other.stage())
		_, err := v.usage(other.staging())
		csitest.Want(t, err, codes.NotFound, csierr.VolumeNotAtPath)
	})
	t.Run("a block volume reports only its size (VS-4)", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		must(t, v.publish("dev"))
		usage := csitest.Got(v.usage(v.guest.path("dev")))(t)
		if len(usage) != 1 || usage[0].GetTotal() != 8*guesttest.MiB {
			t.Fatalf("usage: %v", usage)
		}
	})
}

func TestHealthReportsErrorsOfAVolume(t *testing.T) {
	t.Run("the health of an unknown volume is NOT_FOUND (NH-2)", func(t *testing.T) {
		n := &Service{SysfsRoot: guesttest.Sysfs(t, nil)}
		csitest.Want(t, csitest.Call(t.Context(), n, &csi.NodeGetVolumeHealthRequest{VolumeId: "v",
			StagingTargetPath: "/no/such/path"}), codes.NotFound, csierr.VolumeUnknownToNode)
	})
	t.Run("a read-only filesystem is DEGRADED, a missing device INACCESSIBLE", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		n := v.guest.node()
		must(t, csitest.Call(t.Context(), n, v.stageRequest()))
		health := func(n *Service, path string) (said string) {
			t.Helper()
			resp := csitest.Got(n.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{
				VolumeId: v.ID, StagingTargetPath: path}))(t)
			if got := resp.GetVolumeHealth().GetVolumeId(); got != v.ID {
				t.Fatalf("the health of volume %q", got)
			}
			for _, entry := range resp.GetVolumeHealth().GetHealthStatuses() {
				said += fmt.Sprint(entry.GetStatus(), " ", entry.GetReason(), ";")
			}
			return said
		}
		// The first Service has a record of the volume. The second has none and looks at the path.
		both := func(want string) {
			t.Helper()
			for _, got := range []string{health(n, ""), health(v.guest.node(), v.staging())} {
				if got != want {
					t.Fatalf("the health is %q, want %q", got, want)
				}
			}
		}
		both("")
		turnReadOnly(t, v.staging())
		both("DEGRADED " + string(csierr.FilesystemFailed) + ";")
		v.guest.Unplug(v.disk)
		if got := health(n, ""); strings.Count(got, ";") != 1 ||
			!strings.HasPrefix(got, "INACCESSIBLE ") {
			t.Fatalf("the health without a device is %q", got)
		}
	})
}

func TestNodeExpandIsUnimplementedAndStorageHealthIsEmpty(t *testing.T) { // NE-1, NH-3
	n := &Service{}
	err := csitest.Call(t.Context(), n, &csi.NodeExpandVolumeRequest{})
	health, healthErr := n.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, healthErr)
	if status.Code(err) != codes.Unimplemented || len(health.GetBackendHealth()) > 0 {
		t.Errorf("got %v and %v", err, health)
	}
}

func TestTheInstanceIDIsReadFromOneSourceOrSeveralThatAgree(t *testing.T) { // NI-1, D-28
	const one, two = instance, "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a02"
	oxide := map[string]string{"sys_vendor": "Oxide\n", "product_name": "OxVM\n",
		"product_serial": one + "\n", "product_uuid": one + "\n"}
	for _, c := range []struct {
		name     string
		explicit string
		metadata string // "-" = no file is named
		dmi      map[string]string
		want     string
		says     []string // texts that the error must contain; none means no error
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
			if err == nil {
				return
			}
			csitest.Says(t, err, c.says...)
			if strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error shows a value: %v", err)
			}
		})
	}
}

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

func (g *testGuest) inspect(asked ...inspection.Asked) inspection.Report {
	g.t.Helper()
	b := csitest.Got(json.Marshal(g.node().Inspect(asked)))(g.t)
	r := csitest.Got(inspection.Parse(b))(g.t)
	return r
}

func digest(t *testing.T, dir string) string {
	t.Helper()
	sum := sha256.New()
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		_, _ = fmt.Fprintln(sum, path, info.ModTime(), info.Mode(), string(b))
		return err
	}))
	return fmt.Sprintf("%x", sum.Sum(nil))
}

func TestInspectReportsTheDeviceTheRecordAndTheMounts(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs, "block"} {
		t.Run(fsType, func(t *testing.T) {
			v := statefulGuest(t).disk(320, fsType)
			v.up("pod")
			r := v.guest.inspect(inspection.Asked{ID: v.ID})
			if r.Instance != instance || len(r.Devices) != 1 || len(r.Volumes) != 1 || r.Unseen != nil {
				t.Fatalf("got %+v", r)
			}
			got := r.Volumes[0]
			if got.Serial != v.disk.Serial || got.Record == nil || got.Record.Disk != v.Name ||
				got.Record.Block != (fsType == "block") || got.Unseen != nil {
				t.Errorf("got %+v", got)
			}
			if len(got.Devices) != 1 || got.Devices[0].Name != v.disk.Name ||
				got.Devices[0].SizeBytes != v.disk.SizeBytes || got.Devices[0].BlockBytes != 512 {
				t.Errorf("got the devices %+v", got.Devices)
			}
			var paths []string
			for _, m := range got.Mounts {
				if m.Process == "" {
					paths = append(paths, m.Path)
				}
			}
			want := 2
			if fsType == "block" {
				want = 1
			} else if len(got.Filesystems) != 1 || got.Filesystems[0].Type != fsType ||
				got.Filesystems[0].UUID.String() != v.ID || got.Filesystems[0].NotGrown {
				t.Errorf("got the filesystems %+v", got.Filesystems)
			}
			if len(paths) != want || !strings.HasSuffix(paths[want-1], "pod") {
				t.Errorf("got the mounts %+v", got.Mounts)
			}
		})
	}
}

func TestInspectChangesNothingAndWaitsForNothing(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	must(t, os.WriteFile(filepath.Join(v.guest.state, "trial-1984.new"), nil, 0o600))
	// Another process of the driver has locked the device.
	locked := csitest.Got(os.Open(filepath.Join(v.guest.Dir, "dev", v.disk.Name)))(t)
	defer func() { _ = locked.Close() }()
	must(t, unix.Flock(int(locked.Fd()), unix.LOCK_EX))
	before, same := digest(t, v.guest.state), v.guest.mounts()
	r := v.guest.inspect()
	if len(r.Volumes) != 1 || len(r.Volumes[0].Filesystems) != 1 || r.Volumes[0].Unseen != nil {
		t.Errorf("got %+v", r.Volumes)
	}
	if same(); digest(t, v.guest.state) != before {
		t.Error("something has changed")
	}
	must(t, locked.Close())
	must(t, v.unstage())
	must(t, os.RemoveAll(v.guest.state))
	sameBytes := v.disk.Same(t) // not earlier: the kernel may write to a mounted filesystem
	v.guest.inspect(inspection.Asked{ID: v.ID})
	v.guest.hasRecords()
	sameBytes()
	if _, err := os.Stat(v.guest.state); !os.IsNotExist(err) {
		t.Errorf("the state directory: %v", err)
	}
}

func TestInspectReportsMissingDevicesAndInvalidRecords(t *testing.T) {
	for name, c := range map[string]struct {
		staged bool
		disk   string // the disk that the request names
		act    func(t *testing.T, v testVolume)
		right  func(got inspection.Volume) bool
	}{
		"a volume that was never here": {right: func(got inspection.Volume) bool {
			return got.Serial == "" && got.Record == nil && len(got.Devices)+len(got.Mounts) == 0
		}},
		"a device that became read-only under its mount": {true, "", func(t *testing.T, v testVolume) {
			guesttest.Run(t, "blockdev", "--setro", v.disk.Loop)
			t.Cleanup(func() { guesttest.Run(t, "blockdev", "--setrw", v.disk.Loop) })
		}, func(got inspection.Volume) bool {
			return got.Devices[0].ReadOnly && len(got.Mounts) > 0 && got.Mounts[0].Writable
		}},
		"a disk that the request names": {disk: guesttest.Serial + "-and-more",
			right: func(got inspection.Volume) bool {
				return got.Serial == guesttest.Serial && len(got.Devices) == 1 && len(got.Filesystems) == 0
			}},
		"two devices with the serial": {true, "", func(_ *testing.T, v testVolume) {
			v.guest.Attach(guesttest.Serial, 16*guesttest.MiB)
		}, func(got inspection.Volume) bool {
			return len(got.Devices) == 2 && len(got.Filesystems)+len(got.Mounts) == 0
		}},
		"a device that is gone": {true, "", func(t *testing.T, v testVolume) {
			v.guest.Unplug(v.disk)
			t.Cleanup(func() { v.guest.Plug(v.disk) })
		}, func(got inspection.Volume) bool { return got.Record != nil && len(got.Devices) == 0 }},
		"a device without its node": {false, guesttest.Serial, func(t *testing.T, v testVolume) {
			must(t, os.Remove(v.guest.Dev(v.disk.Name)))
		}, func(got inspection.Volume) bool {
			return len(got.Devices) == 1 && len(got.Problems) == 1 &&
				got.Problems[0].Reason == csierr.DeviceNotFound &&
				inspection.WhyUnseen(got.Unseen, inspection.PartFilesystem) != ""
		}},
		"an invalid record": {false, "", func(t *testing.T, v testVolume) {
			must(t, os.MkdirAll(v.guest.state, 0o700))
			must(t, os.WriteFile(filepath.Join(v.guest.state, v.ID+".json"), []byte("{"), 0o600))
		}, func(got inspection.Volume) bool {
			return got.Record == nil && inspection.WhyUnseen(got.Unseen, inspection.PartRecord) != ""
		}},
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(16, volume.Ext4)
			if c.staged {
				must(t, v.stage())
			}
			if c.act != nil {
				c.act(t, v)
			}
			r := v.guest.inspect(inspection.Asked{ID: v.ID, Disk: c.disk})
			if got := r.Volumes[0]; !c.right(got) {
				t.Errorf("got %+v", got)
			}
		})
	}
	g := statefulGuest(t)
	must(t, os.RemoveAll(g.Sys("block")))
	if r := g.inspect(); inspection.WhyUnseen(r.Unseen, inspection.PartDevices) == "" {
		t.Errorf("without sysfs: got %+v", r)
	}
}

func TestInspectReportsUnfinishedChanges(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	recorder := &flight.Recorder{Log: slog.New(slog.DiscardHandler),
		Dir: filepath.Join(v.guest.state, flight.DirName)}
	ctx := flight.With(t.Context(), recorder, flight.Fields{Volume: v.ID, Disk: v.Name})
	flight.Of(ctx).Begin(flight.Formatted, flight.Fields{}).End(nil, flight.Fields{})
	flight.Of(ctx).Begin(flight.Mounted, flight.Fields{Path: "/staging"})
	got := v.guest.inspect(inspection.Asked{ID: v.ID}).Volumes[0]
	if len(got.Flight) != 3 || len(got.Open) != 1 || got.Open[0].Event != flight.Mounted ||
		got.From != "the flight recorder" || len(got.Devices) != 1 {
		t.Errorf("got %+v", got)
	}
}
