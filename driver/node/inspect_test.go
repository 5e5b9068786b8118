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

func (g *testGuest) inspect(asked ...inspection.Asked) inspection.Report {
	g.t.Helper()
	b, err := json.Marshal(g.node().Inspect(asked))
	must(g.t, err)
	r, err := inspection.Parse(b)
	must(g.t, err)
	return r
}

// digest returns a hash of all files below a directory, with their times and modes.
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

func TestAnInspectionChangesNothingAndWaitsForNothing(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, v.stage())
	must(t, os.WriteFile(filepath.Join(v.guest.state, "trial-1984.new"), nil, 0o600))
	// Another process of the driver works on the device.
	locked, err := os.Open(filepath.Join(v.guest.Dir, "dev", v.disk.Name))
	must(t, err)
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
	sameBytes := v.disk.Same(t) // the kernel writes to a mounted filesystem at any time
	if v.guest.inspect(inspection.Asked{ID: v.ID}); len(v.guest.records()) != 0 {
		t.Errorf("made %q", v.guest.records())
	}
	sameBytes()
	if _, err := os.Stat(v.guest.state); !os.IsNotExist(err) {
		t.Errorf("the state directory: %v", err)
	}
}

func TestAnInspectionFindsWhatIsMissingOrWrong(t *testing.T) {
	for name, c := range map[string]struct {
		staged bool
		disk   string // that the request names
		act    func(t *testing.T, v testVolume)
		right  func(v testVolume, got inspection.Volume) bool
	}{
		"a volume that was never here": {false, "", func(*testing.T, testVolume) {},
			func(_ testVolume, got inspection.Volume) bool {
				return got.Serial == "" && got.Record == nil && len(got.Devices)+len(got.Mounts) == 0
			}},
		"a device that became read-only under its mount": {true, "", func(t *testing.T, v testVolume) {
			guesttest.Run(t, "blockdev", "--setro", v.disk.Loop)
			t.Cleanup(func() { guesttest.Run(t, "blockdev", "--setrw", v.disk.Loop) })
		}, func(_ testVolume, got inspection.Volume) bool {
			return got.Devices[0].ReadOnly && len(got.Mounts) > 0 && got.Mounts[0].Writable
		}},
		"a disk that the request names": {false, guesttest.Serial + "-and-more",
			func(*testing.T, testVolume) {}, func(v testVolume, got inspection.Volume) bool {
				return got.Serial == v.Name && len(got.Devices) == 1 && len(got.Filesystems) == 0
			}},
		"two devices with the serial": {true, "", func(_ *testing.T, v testVolume) {
			v.guest.Attach(guesttest.Serial, 16*guesttest.MiB)
		}, func(_ testVolume, got inspection.Volume) bool {
			return len(got.Devices) == 2 && len(got.Filesystems)+len(got.Mounts) == 0
		}},
		"a device that is gone": {true, "", func(t *testing.T, v testVolume) {
			v.guest.Unplug(v.disk)
			t.Cleanup(func() { v.guest.Plug(v.disk) })
		}, func(_ testVolume, got inspection.Volume) bool {
			return got.Record != nil && len(got.Devices) == 0
		}},
		"a device without its node": {false, guesttest.Serial, func(t *testing.T, v testVolume) {
			must(t, os.Remove(v.guest.Dev(v.disk.Name)))
		}, func(_ testVolume, got inspection.Volume) bool {
			return len(got.Devices) == 1 && len(got.Problems) == 1 &&
				got.Problems[0].Reason == csierr.DeviceNotFound &&
				inspection.WhyUnseen(got.Unseen, inspection.PartFilesystem) != ""
		}},
		"an invalid record": {false, "", func(t *testing.T, v testVolume) {
			must(t, os.MkdirAll(v.guest.state, 0o700))
			must(t, os.WriteFile(filepath.Join(v.guest.state, v.ID+".json"), []byte("{"), 0o600))
		}, func(_ testVolume, got inspection.Volume) bool {
			return got.Record == nil && inspection.WhyUnseen(got.Unseen, inspection.PartRecord) != ""
		}},
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(16, volume.Ext4)
			if c.staged {
				must(t, v.stage())
			}
			c.act(t, v)
			r := v.guest.inspect(inspection.Asked{ID: v.ID, Disk: c.disk})
			if got := r.Volumes[0]; !c.right(v, got) {
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

func TestAnInspectionShowsOpenChanges(t *testing.T) {
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
