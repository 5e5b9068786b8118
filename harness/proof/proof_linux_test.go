package proof_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// A loop device's owner names a process by its ID and start time. The test adds a digit to the
// start time, so that the owner is a process that has ended.
func TestANewRunDetachesLoopDevicesOfEndedProcesses(t *testing.T) {
	rack := harness.Need(harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{}))(t)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	disk := harness.Need(rack.CreateDisk(t.Context(), rack.Project, "of-a-living-process",
		harness.GiB))(t)
	csitest.Must(t, rack.AttachDisk(t.Context(), disk.Id, rack.Instance("a").ID))
	ended := harness.Need(loopdev.Attach(t.Context(), loopdev.Config{Path: proof.DiskFile(rack,
		disk.Id), Serial: "of-an-ended-process", Owner: loopdev.Process() + "0"}))(t)
	harness.RunFor(t)
	all := harness.Need(loopdev.List())(t)
	living := 0
	for _, d := range all {
		if d.Owner == ended.Owner {
			t.Errorf("a new run did not release %+v", d)
		}
		if d.BackingInode == ended.BackingInode && strings.HasPrefix(d.Owner, loopdev.Process()+".") {
			living++
		}
	}
	if living != 1 {
		t.Errorf("%d devices of the rack name this process, want 1: %+v", living, all)
	}
}

func TestAbandonStopsProcessesAndReleasesMountsAndLoopDevices(t *testing.T) {
	run, ctx := harness.RunFor(t), t.Context()
	env := harness.Need(proof.New(t, "abandoned").StartEnvironment(ctx, run, harness.RackOptions{},
		"a", proof.Journal))(t)
	nodes := harness.Need(env.StartNodes(ctx, harness.PluginOptions{}))(t)
	mountpoint := nodes["b"].Kubelet("volume")
	csitest.Must(t, os.MkdirAll(mountpoint, 0o750))
	csitest.Must(t, unix.Mount("volume", mountpoint, "tmpfs", 0, ""))
	used := harness.Need(os.Create(filepath.Join(mountpoint, "used")))(t)
	defer used.Close()
	before := harness.Need(harness.KernelLedger(env.Rack.Dir))(t)
	if len(before) != 4 {
		t.Errorf("the environment has %v, want a mount and the devices of three bystanders", before)
	}
	csitest.Must(t, env.Abandon(ctx))
	left := harness.Need(harness.KernelLedger(env.Rack.Dir))(t)
	if len(left) > 0 || env.Rack.Running() || nodes["a"].Running() || nodes["b"].Running() {
		t.Errorf("the abandoned environment still has %v, or a process", left)
	}
}

func TestPrintAppendsResultsToTheConfiguredFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "figures")
	t.Setenv("PROOF_FIGURES", path)
	for _, line := range []string{proof.Line("a", "n", 1), proof.Line("b", "n", 2, "m", "x")} {
		csitest.Must(t, proof.Print(line))
	}
	got := harness.Need(os.ReadFile(path))(t)
	if want := "FIGURE a n=1\nFIGURE b n=2 m=x\n"; string(got) != want {
		t.Errorf("the file contains %q, want %q", got, want)
	}
}

func TestEnvironmentVariablesSetTheSeedAndDurationOfAProof(t *testing.T) {
	const nanosecond = "3600000000000" // as PROOF_SHARES, it leaves each proof 1 ns of 1h
	for _, c := range []struct {
		seed, duration, shares string
		long, over             bool
	}{{"7", "1h", "", true, false}, {"7", "1h", nanosecond, true, true},
		{"", "", nanosecond, false, false}} {
		t.Setenv("PROOF_SEED", c.seed)
		t.Setenv("PROOF_DURATION", c.duration)
		t.Setenv("PROOF_SHARES", c.shares)
		p := proof.New(t, "some-proof")
		if p.Long() != c.long || p.Over() != c.over || c.seed == "7" && p.Seed != 7 {
			t.Errorf("%+v: seed %d, long %t, over %t", c, p.Seed, p.Long(), p.Over())
		}
		if a, b := p.Rand().Uint64(), proof.New(t, "other").Rand().Uint64(); a != b {
			t.Errorf("one seed has the random numbers %d and %d", a, b)
		}
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }

// Check compares only modification times. Close also compares the bytes, so it notices all writes.
func TestAWriteToADiskThatNoCSICallNamesIsReported(t *testing.T) {
	poke := func(role int) func(*proof.Bystanders, string) error {
		return func(b *proof.Bystanders, _ string) error {
			return proof.WriteAt(b.Loop(role).Path, 77<<20, 1)
		}
	}
	const btrfs, silent = "a byte of the member of a btrfs", "a byte, with the old modification time"
	for name, write := range map[string]func(b *proof.Bystanders, dir string) error{
		"a byte of the journal":    poke(proof.MemberDisk),
		btrfs:                      poke(proof.MemberDisk),
		"a byte of the blank disk": poke(proof.BlankDisk),
		"a file of the mounted disk": func(_ *proof.Bystanders, dir string) error {
			return proof.WriteAt(filepath.Join(dir, "mounted", "file"), 0, 1)
		},
		"a missing mount": func(_ *proof.Bystanders, dir string) error {
			return unix.Unmount(filepath.Join(dir, "mounted"), 0)
		},
		silent: func(_ *proof.Bystanders, dir string) error {
			path := filepath.Join(dir, "bystander-2")
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			return errors.Join(proof.WriteAt(path, 9, 1), os.Chtimes(path, time.Time{}, info.ModTime()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, member := t.TempDir(), proof.Journal
			if name == btrfs {
				member = proof.BtrfsMember
			}
			b := harness.Need(proof.NewGuestBystanders(t.Context(), dir, member,
				&proof.Invariant{}))(t)
			csitest.Must(t, errors.Join(b.Check(), write(b, dir)))
			if err := b.Check(); (err == nil) != (name == silent) {
				t.Errorf("after the call: %v", err)
			}
			if err := b.Close(); (err == nil) == (name == silent) {
				t.Errorf("at the end: %v", err)
			}
		})
	}
}

const mib = 1 << 20

func mountNew(t *testing.T, fs string, size int64) (f proof.Forgery, dir string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f = proof.Forgery{Volume: "a volume", Disk: "csi-0123456789abcdef", Filesystem: fs,
		SizeBytes: size, NextBytes: 512 * mib}
	csitest.Must(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, f.SizeBytes),
		proof.RunTool("mkfs."+fs, "-q", path)))
	loop := harness.Need(loopdev.Attach(t.Context(), loopdev.Config{Path: path,
		Serial: fmt.Sprint("forged-", os.Getpid(), fs), Owner: loopdev.Process()}))(t)
	t.Cleanup(func() { csitest.Must(t, loop.Detach(context.Background())) })
	f.Device, dir = loop.Path, t.TempDir()
	csitest.Must(t, unix.Mount(loop.Path, dir, fs, 0, ""))
	t.Cleanup(func() { csitest.Must(t, unix.Unmount(dir, 0)) })
	return f, dir
}

// Write is tested on ext4 and xfs: only these report which blocks a file has. Fill writes up to the
// disk's end, where the growth records are.
func TestForgeryWritesRecordsAtTheOffsetsOfTheDriversRecords(t *testing.T) {
	fill := func(f proof.Forgery, dir string) (proof.ForgedFiles, error) { return f.Fill(dir, true) }
	for name, c := range map[string]struct {
		fs          string
		size        int64
		write       func(f proof.Forgery, dir string) (proof.ForgedFiles, error)
		formats     bool // check the offsets of format records, too
		record      string
		least, free int64
	}{
		"ext4":   {"ext4", 320 * mib, proof.Forgery.Write, true, "a volume", 5, 150 * mib},
		"xfs":    {"xfs", 320 * mib, proof.Forgery.Write, true, "a volume", 4, 150 * mib},
		"filled": {"ext4", 64 * mib, fill, false, `"growFrom":33554432,"mounted":`, 3, 4 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			f, dir := mountNew(t, c.fs, c.size)
			csitest.Must(t, harness.Need(c.write(f, dir))(t).Check(dir))
			unix.Sync()
			device := harness.Need(os.Open(f.Device))(t)
			defer device.Close()
			slots := proof.GrowthSlots(f.SizeBytes)
			if c.formats {
				slots = append(slots, proof.FormatSlots(f.SizeBytes)...)
			}
			hits, b := int64(0), make([]byte, 512)
			for _, slot := range slots {
				harness.Need(device.ReadAt(b, slot))(t)
				if bytes.HasPrefix(b, []byte("oxide-csi format")) && bytes.Contains(b, []byte(c.record)) {
					hits++
				}
			}
			var st unix.Statfs_t
			csitest.Must(t, unix.Statfs(dir, &st))
			if free := int64(st.Bavail) * st.Bsize; hits < c.least || free < c.free {
				t.Errorf("%d of %d offsets have a forged record, want %d; %d bytes are left for the "+
					"workload, want %d", hits, len(slots), c.least, free, c.free)
			}
		})
	}
}
