//go:build linux

package node

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// inspect inspects the volumes as a process of its own does, and reads the report as the doctor
// does.
func (g *testGuest) inspect(asked ...inspection.Asked) inspection.Report {
	g.t.Helper()
	b, err := json.Marshal(g.node().Inspect(asked))
	must(g.t, err)
	r, err := inspection.Parse(b)
	must(g.t, err)
	return r
}

// digest is a digest of every file below a directory, with its time.
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

func TestAnInspectionSeesAVolumeFromItsDeviceToItsMounts(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs, "block"} {
		t.Run(fsType, func(t *testing.T) {
			v := statefulGuest(t).disk(320, fsType)
			must(t, v.stage())
			must(t, v.publish("pod"))
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

func TestAnInspectionChangesNothingAndWaitsForNothing(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	must(t, os.WriteFile(filepath.Join(v.guest.state, "trial-1984.new"), nil, 0o600))
	// Another process of the driver works on the device.
	locked, err := os.Open(filepath.Join(v.guest.Dir, "dev", v.disk.Name))
	must(t, err)
	defer func() { _ = locked.Close() }()
	must(t, unix.Flock(int(locked.Fd()), unix.LOCK_EX))
	before, mounts := digest(t, v.guest.state), guesttest.Mounts(t, v.guest.Dir)
	r := v.guest.inspect()
	if len(r.Volumes) != 1 || len(r.Volumes[0].Filesystems) != 1 || r.Volumes[0].Unseen != nil {
		t.Errorf("got %+v", r.Volumes)
	}
	if digest(t, v.guest.state) != before ||
		strings.Join(guesttest.Mounts(t, v.guest.Dir), "\n") != strings.Join(mounts, "\n") {
		t.Error("something has changed")
	}
	must(t, locked.Close())
	must(t, v.unstage())
	must(t, os.RemoveAll(v.guest.state))
	disk := v.disk.Digest(t) // the kernel changes that of a mounted filesystem at any time
	if v.guest.inspect(inspection.Asked{ID: v.ID}); len(v.guest.records()) != 0 {
		t.Errorf("made %q", v.guest.records())
	}
	if v.disk.Digest(t) != disk {
		t.Error("the disk has changed")
	}
	if _, err := os.Stat(v.guest.state); !os.IsNotExist(err) {
		t.Errorf("the state directory: %v", err)
	}
}

func TestAnInspectionFindsWhatIsMissingOrWrong(t *testing.T) {
	t.Run("a volume that was never here", func(t *testing.T) {
		g := statefulGuest(t)
		got := g.inspect(inspection.Asked{ID: "0b54dc0e-93a4-4f5f-8f5d-000000000001"}).Volumes[0]
		if got.Serial != "" || got.Record != nil || len(got.Devices)+len(got.Mounts) != 0 {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a device that became read-only under its mount", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		device, err := os.Open(filepath.Join(v.guest.Dir, "dev", v.disk.Name))
		must(t, err)
		defer func() { _ = device.Close() }()
		must(t, unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 1))
		defer func() { _ = unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 0) }()
		got := v.guest.inspect(inspection.Asked{ID: v.ID}).Volumes[0]
		if !got.Devices[0].ReadOnly || len(got.Mounts) == 0 || !got.Mounts[0].Writable {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a disk that the request names", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		got := v.guest.inspect(inspection.Asked{ID: v.ID, Disk: v.Name + "-and-more"}).Volumes[0]
		if got.Serial != v.Name || len(got.Devices) != 1 || len(got.Filesystems) != 0 {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("two devices with the serial", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		v.guest.Attach(guesttest.Serial, 16*guesttest.MiB)
		got := v.guest.inspect(inspection.Asked{ID: v.ID}).Volumes[0]
		if len(got.Devices) != 2 || len(got.Filesystems) != 0 || len(got.Mounts) != 0 {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a device that is gone", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, v.stage())
		v.guest.Unplug(v.disk)
		got := v.guest.inspect(inspection.Asked{ID: v.ID}).Volumes[0]
		if got.Record == nil || len(got.Devices) != 0 {
			t.Errorf("got %+v", got)
		}
		v.guest.Plug(v.disk)
	})
	t.Run("a device without its node", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, os.Remove(v.guest.Dev(v.disk.Name)))
		got := v.guest.inspect(inspection.Asked{ID: v.ID, Disk: v.Name}).Volumes[0]
		if len(got.Devices) != 1 || len(got.Problems) != 1 ||
			got.Problems[0].Reason != csierr.DeviceNotFound ||
			inspection.WhyUnseen(got.Unseen, inspection.PartFilesystem) == "" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a record that makes no sense", func(t *testing.T) {
		v := statefulGuest(t).disk(16, volume.Ext4)
		must(t, os.MkdirAll(v.guest.state, 0o700))
		must(t, os.WriteFile(filepath.Join(v.guest.state, v.ID+".json"), []byte("{"), 0o600))
		got := v.guest.inspect(inspection.Asked{ID: v.ID}).Volumes[0]
		if got.Record != nil || inspection.WhyUnseen(got.Unseen, inspection.PartRecord) == "" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("no sysfs", func(t *testing.T) {
		g := statefulGuest(t)
		must(t, os.RemoveAll(g.Sys("block")))
		if r := g.inspect(); inspection.WhyUnseen(r.Unseen, inspection.PartDevices) == "" {
			t.Errorf("got %+v", r)
		}
	})
}

func TestAnInspectionShowsWhatWasBegunAndNotEnded(t *testing.T) {
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
