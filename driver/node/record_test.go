//go:build linux

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func (g *testGuest) records() []string {
	g.t.Helper()
	entries, err := os.ReadDir(g.state)
	if os.IsNotExist(err) {
		return nil
	}
	must(g.t, err)
	var names []string
	for _, e := range entries {
		if e.Name() != lockName {
			names = append(names, e.Name())
		}
	}
	return names
}

func (g *testGuest) hasRecords(want ...string) {
	g.t.Helper()
	if got := g.records(); !slices.Equal(got, want) {
		g.t.Errorf("the state directory has the records %q, want %q", got, want)
	}
}

func (v testVolume) isKnown(want bool) {
	v.guest.t.Helper()
	if r, known := v.guest.node().records().of(v.ID).load(); known != want {
		v.guest.t.Errorf("the driver has a record: %t, %+v", known, r)
	}
}

func TestInvalidRecordsAreRejected(t *testing.T) {
	for _, text := range []string{
		"", "\x00\x00\x00\x00", "null", "[]", "{}", "7", `{"version":1}`,
		`{"version":2,"volume":"v","instance":"i","disk":"d"}`,
		`{"version":1,"volume":"","instance":"i","disk":"d"}`,
		`{"version":1,"volume":"v","instance":"i","disk":""}`,
		`{"version":1,"volume":"v","instance":"","disk":"d"}`,
		`{"version":1,"volume":"v","instance":"i","disk":"d","more":1}`,
		`{"version":1,"volume":"v","instance":"i","disk":"d"} {}`,
		`{"version":1,"volume":"v","instance":"i","disk":"d"}` + strings.Repeat(" ", maxRecordBytes),
	} {
		if r, err := parseRecord([]byte(text)); err == nil {
			t.Errorf("%.80q is taken for %+v", text, r)
		}
	}
}

// The test removes the state directory before one of the calls from stage to unstage. Each call is
// made by a new Service, and must succeed without the directory, too.
func TestNodeCallsSucceedAfterTheStateDirectoryIsRemoved(t *testing.T) { // B-10
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs, "block", "static ext4"} {
		for lost := range 9 {
			v := statefulGuest(t).disk(512, fsType)
			if fsType == "static ext4" {
				guesttest.Run(t, "mkfs.ext4", "-q", v.disk.Loop)
				v.FSType, v.Static = volume.Ext4, true
			}
			readOnly := v.publish
			if fsType == "block" {
				readOnly = v.publishReadOnly
			}
			for i, step := range []func() error{
				v.stage, v.stage, func() error { return readOnly("pod") },
				func() error { return readOnly("pod") },
				func() error { return v.unpublish("pod") }, func() error { return v.unpublish("pod") },
				v.unstage, v.unstage,
			} {
				if i == lost {
					must(t, os.RemoveAll(v.guest.state))
				}
				if err := step(); err != nil {
					t.Fatalf("%s, directory lost before step %d: step %d: %v", fsType, lost, i, err)
				}
				if i >= 4 {
					absent(t, v.guest.path("pod")) // UP-3
				}
			}
			if left := append(guesttest.Mounts(t, v.guest.Dir), v.guest.records()...); len(left) != 0 {
				t.Fatalf("%s, directory lost before step %d: left %q", fsType, lost, left)
			}
			must(t, v.exclusive())
		}
	}
}

func TestAnInvalidRecordIsIgnoredAndLogged(t *testing.T) {
	for name, text := range map[string]string{
		"truncated": `{"version":1,"vol`, "empty": "", "of a later version": `{"version":9}`,
		"of another volume": `{"version":1,"volume":"other","instance":"` + instance + `","disk":"d"}`,
		"of another instance": `{"version":1,"volume":"` + idPrefix + `000000000001",` +
			`"instance":"x","disk":"d"}`,
	} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(8, "block")
			must(t, os.MkdirAll(v.guest.state, 0o700))
			file := filepath.Join(v.guest.state, v.ID+".json")
			must(t, os.WriteFile(file, []byte(text), 0o600))
			must(t, v.guest.node().OpenState())
			v.isKnown(false)
			if !strings.Contains(v.guest.log.String(), v.ID+".json") {
				t.Errorf("the log does not name it: %s", v.guest.log.String())
			}
			v.up("dev")
			csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
			v.down("dev")
		})
	}
}

func TestStartupRemovesOnlyTheDriversTemporaryFiles(t *testing.T) {
	g := statefulGuest(t)
	must(t, g.node().OpenState())
	info := csitest.Got(os.Stat(g.state))(t)
	if info.Mode().Perm() != 0o700 {
		t.Errorf("its mode is %v", info.Mode())
	}
	others := []string{"config.new", "x.json.new", "trial-.new", "trial-1984.new.old", "trial-x.new",
		"passwd.new", "0" + recordFile(racktest.Disk) + newSuffix, recordFile(racktest.Disk) + ".newer",
		strings.ToUpper(recordFile("no UUID")) + newSuffix}
	for _, name := range append([]string{recordFile(racktest.Disk) + newSuffix,
		recordFile("no UUID") + newSuffix, "trial-1984.new"}, others...) {
		must(t, os.WriteFile(filepath.Join(g.state, name), []byte("precious"), 0o600))
	}
	// A directory is not the driver's, even if it has the name of a temporary file.
	others = append(others, recordFile(racktest.Instance)+newSuffix)
	must(t, os.Mkdir(filepath.Join(g.state, recordFile(racktest.Instance)+newSuffix), 0o700))
	must(t, g.node().OpenState())
	slices.Sort(others)
	g.hasRecords(others...)
}

func TestStageFailsIfItsRecordCannotBeWritten(t *testing.T) {
	g := statefulGuest(t)
	must(t, os.WriteFile(filepath.Dir(g.state), nil, 0o600))
	if err := g.node().OpenState(); err == nil || strings.Contains(err.Error(), g.Dir) {
		t.Errorf("at the start: %v", err)
	}
	v := g.disk(8, volume.Ext4)
	same := v.disk.Same(t)
	csitest.Want(t, v.stage(), codes.Internal, csierr.StateNotKept)
	same()
	must(t, os.Remove(filepath.Dir(g.state)))
	must(t, v.stage())
	// The volume can be unstaged without a record, even if no record can be written.
	must(t, os.RemoveAll(filepath.Dir(g.state)))
	must(t, os.WriteFile(filepath.Dir(g.state), nil, 0o600))
	must(t, v.unstage())
	// If the directory is full, the error says so, and calls for volumes with a record succeed.
	g.state = smallTmpfs(t, 64<<10)
	must(t, v.stage())
	_ = os.WriteFile(filepath.Join(g.state, "somebody's"), make([]byte, 64<<10), 0o600)
	csitest.Want(t, g.disk(8, volume.Ext4, guesttest.OtherSerial).stage(),
		codes.Internal, csierr.StateNotKept, unix.ENOSPC.Error())
	must(t, v.publish("pod"))
	v.down("pod")
}

func TestAFailedStageLeavesNoNewRecord(t *testing.T) {
	v := statefulGuest(t).disk(16, volume.Ext4)
	must(t, os.WriteFile(v.disk.File, []byte("somebody's"), 0o600))
	must(t, os.Truncate(v.disk.File, 16*guesttest.MiB))
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
	v.guest.hasRecords()
	other := v.guest.disk(16, volume.Ext4, "csi-another000000000")
	must(t, other.stage())
	other.FSType = volume.Ext3
	csitest.Want(t, other.stage(), codes.AlreadyExists, csierr.StagedDifferently)
	v.guest.hasRecords(recordFile(other.ID)) // other is staged, so its record stays
	other.FSType = volume.Ext4
	must(t, other.unstage())
}

func TestUnstageOfAFormerBlockVolumeFailsWhileItsDeviceIsOpen(t *testing.T) { // NS-12, NU-5
	v := statefulGuest(t).disk(16, "block")
	must(t, v.stage())
	v.guest.hasMounts(0)
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
	v.FSType = volume.Ext4
	must(t, v.stage())
	writer := opening(t, "<>", v.disk.Loop)
	csitest.Want(t, v.unstageSoon(), codes.Internal, csierr.StillMounted)
	writer.leave()
	must(t, v.unstage())
}

func TestALinkInTheStateDirectoryIsNotFollowed(t *testing.T) {
	v := statefulGuest(t).disk(8, "block")
	must(t, v.stage())
	file := filepath.Join(v.guest.state, v.ID+".json")
	elsewhere := filepath.Join(v.guest.Dir, "elsewhere")
	must(t, os.Rename(file, elsewhere))
	before := csitest.Got(os.ReadFile(elsewhere))(t)
	must(t, os.Symlink(elsewhere, file))
	v.isKnown(false) // a link is not read
	must(t, os.WriteFile(elsewhere, append(before, "precious"...), 0o600))
	must(t, os.Symlink(elsewhere, file+newSuffix))
	must(t, v.stage())
	if b, err := os.ReadFile(elsewhere); err != nil || string(b) != string(before)+"precious" {
		t.Errorf("the file that the link leads to is %q, %v", b, err)
	}
	v.isKnown(true)
	must(t, v.unstage())
}

// stopOnce makes a call that runs the program, and waits until the program has begun. goOn() lets
// the program continue, and returns the result of the call.
func stopOnce(t *testing.T, program string, call func() error) (goOn func() error) {
	t.Helper()
	begun, file := filepath.Join(t.TempDir(), "begun"), filepath.Join(t.TempDir(), "go on")
	tools(t, map[string]string{program: fmt.Sprintf(`if mkdir '%s' 2>/dev/null; then
while [ ! -e '%s' ]; do sleep 0.01; done; fi; "$real" "$@"`, begun, file)})
	result := start(call)
	csitest.Await(t, program+" has begun", func() bool { return exists(begun) == nil })
	return func() error {
		must(t, os.WriteFile(file, nil, 0o600))
		return result()
	}
}

func start(call func() error) (result func() error) {
	called := async.Start(func() (struct{}, error) { return struct{}{}, call() })
	return func() error {
		_, err := called()
		return err
	}
}

func TestTwoDriverProcessesDoNotUseOneDeviceAtTheSameTime(t *testing.T) { // NS-9, NU-6
	t.Run("a driver is refused while another one formats the disk", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		goOn := stopOnce(t, "mke2fs", v.stage)
		csitest.Want(t, v.stage(), codes.Aborted, csierr.DeviceLocked, "(mke2fs)")
		csitest.Want(t, v.unstage(), codes.Aborted, csierr.DeviceLocked)
		alias := v // another volume of the same disk
		alias.ID, alias.Static = "by-hand", true
		csitest.Want(t, alias.stage(), codes.Aborted, csierr.DeviceLocked)
		v.guest.hasRecords(recordFile(v.ID)) // the refused calls left no record
		must(t, goOn())
		must(t, v.stage())
		v.checkStaged(t)
	})
	t.Run("a driver is refused while a dead driver's program runs", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		// The program inherits the device and its lock from a driver that then closes both.
		host := v.guest.node().host()
		found := csitest.Got(host.Lookup(v.Name))(t)
		h := csitest.Got(host.OpenLocked(t.Context(), found, false))(t)
		program := exec.Command("sleep", "infinity")
		program.ExtraFiles = h.Inherited
		must(t, program.Start())
		t.Cleanup(func() { _ = program.Process.Kill(); _ = program.Wait() })
		must(t, h.Close())
		for _, err := range []error{v.stage(), v.publish("pod")} {
			csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked,
				fmt.Sprintf("process %d (sleep)", program.Process.Pid))
		}
		must(t, program.Process.Kill())
		_ = program.Wait()
		must(t, v.stage())
		v.checkStaged(t)
	})
	t.Run("a driver with another state directory is refused, too", func(t *testing.T) {
		v := statefulGuest(t).disk(64, volume.Ext4)
		goOn := stopOnce(t, "mke2fs", v.stage)
		other, w := v.guest.node(), v
		other.StateDir, w.Staging = t.TempDir(), v.guest.path("another staging path")
		err := csitest.Call(t.Context(), other, w.stageRequest())
		must(t, goOn())
		csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked)
		v.checkStaged(t)
	})
	t.Run("without a state directory, stage waits for the device's flock", func(t *testing.T) {
		v := newGuest(t).disk(64, volume.Ext4)
		node := filepath.Join(v.guest.Dir, "dev", v.disk.Name)
		f := csitest.Got(os.Open(node))(t)
		must(t, unix.Flock(int(f.Fd()), unix.LOCK_SH))
		staged := start(v.stage)
		csitest.Await(t, "the call waits", func() bool { return ownDescriptors(t, node, "") > 1 })
		must(t, f.Close())
		must(t, staged())
	})
}

func TestUnstageIsAbortedWhileAnotherProcessStagesTheVolume(t *testing.T) {
	v := statefulGuest(t).disk(64, volume.Ext4)
	v.guest.Unplug(v.disk)
	other := v.guest.node()
	other.DeviceTimeout = time.Minute
	staged := start(func() error { return csitest.Call(t.Context(), other, v.stageRequest()) })
	locks := filepath.Join(v.guest.state, lockName)
	csitest.Await(t, "the stage has its lock", func() bool {
		return ownDescriptors(t, locks, "lock:") > 0
	})
	csitest.Want(t, v.unstage(), codes.Aborted, csierr.DeviceLocked)
	csitest.Want(t, v.unpublish("pod"), codes.Aborted, csierr.DeviceLocked)
	v.guest.Plug(v.disk)
	must(t, staged())
	must(t, v.unstage())
	v.guest.hasMounts(0)
}

func TestLocksWorkAfterTheirFileIsRemoved(t *testing.T) {
	g := statefulGuest(t)
	hold := func() (heldVolume, error) { return g.node().hold(t.Context(), "a volume") }
	held := csitest.Got(hold())(t)
	waiting := async.Start(hold)
	locks := filepath.Join(g.state, lockName)
	csitest.Await(t, "the second waits", func() bool { return ownDescriptors(t, locks, "") > 1 })
	must(t, os.RemoveAll(g.state))
	must(t, held.lock.Close())
	second, err := waiting()
	must(t, err)
	_, err = hold()
	csitest.Want(t, err, codes.Aborted, csierr.DeviceLocked)
	must(t, second.lock.Close())
	third := csitest.Got(hold())(t)
	must(t, third.lock.Close())
}

func ownDescriptors(t *testing.T, path, info string) (n int) {
	t.Helper()
	links := csitest.Got(filepath.Glob("/proc/self/fd/*"))(t)
	for _, link := range links {
		text, _ := os.ReadFile("/proc/self/fdinfo/" + filepath.Base(link))
		if target, err := os.Readlink(link); err == nil && target == path &&
			strings.Contains(string(text), info) {
			n++
		}
	}
	return n
}
