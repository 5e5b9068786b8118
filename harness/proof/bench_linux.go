package proof

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Members contains both kinds of members.
var Members = []Member{Journal, BtrfsMember}

// Bench is a [GuestView] with a driver in it, to which one disk after the other is attached.
// Proofs that need no rack use it.
type Bench struct {
	// Dir contains all files of the bench.
	Dir    string
	Guest  GuestView
	Plugin *harness.Plugin
	// Bin comes first in the driver's PATH. A proof may put programs there that replace the
	// system's.
	Bin string
	// Bystanders are other disks of the guest. No call may change them.
	Bystanders *GuestBystanders
	// Forged counts how often files with forged records were compared.
	Forged *Invariant
}

// StartBench starts a driver in a guest of its own: the given program, or the run's driver if
// program is empty. The driver gets the environment of the guest, and env in addition.
func StartBench(ctx context.Context, run *harness.Run, program string, env map[string]string) (
	b *Bench, err error) {
	defer harness.Catch(&err)
	dir := harness.Got(os.MkdirTemp(run.Dir, "bench-"))
	b = &Bench{Dir: dir, Bin: filepath.Join(dir, "bin"), Bystanders: &GuestBystanders{},
		Forged: &Invariant{}, Guest: harness.Got(NewGuestView(filepath.Join(dir, "guest")))}
	harness.Must(os.Mkdir(b.Bin, 0o755))
	all := map[string]string{
		"OXIDE_INSTANCE_ID": InstanceID,
		"OXIDE_SYSFS_ROOT":  b.Guest.Sys(""),
		"OXIDE_DEV_ROOT":    b.Guest.Node(""),
		"PATH":              b.Bin + ":" + os.Getenv("PATH"),
		// The guest shows a device before any call needs it, so the driver need not wait long.
		"OXIDE_DEVICE_TIMEOUT": "20ms",
	}
	maps.Copy(all, env)
	options := harness.PluginOptions{Mode: harness.ModeNode, Env: all}
	if program != "" {
		options.Command = []string{program}
	}
	b.Plugin = harness.Got(run.StartPlugin(ctx, options))
	return b, nil
}

// AddBystanders gives the guest bystanders.
func (b *Bench) AddBystanders(ctx context.Context, member Member, count *Invariant) (err error) {
	b.Bystanders, err = NewGuestBystanders(ctx, b.Guest, filepath.Join(b.Dir, "bystanders"), member,
		count)
	return err
}

// Stage calls NodeStageVolume and then checks the bystanders. Publish, Unpublish and Unstage
// check them, too.
func (b *Bench) Stage(ctx context.Context, p *harness.Placement) error {
	return b.step(ctx, "stage", p.Stage)
}

// Publish calls NodePublishVolume.
func (b *Bench) Publish(ctx context.Context, p *harness.Placement) error {
	return b.step(ctx, "publish", p.Publish)
}

// Unpublish calls NodeUnpublishVolume.
func (b *Bench) Unpublish(ctx context.Context, p *harness.Placement) error {
	return b.step(ctx, "unpublish", p.Unpublish)
}

// Unstage calls NodeUnstageVolume.
func (b *Bench) Unstage(ctx context.Context, p *harness.Placement) error {
	return b.step(ctx, "unstage", p.Unstage)
}

func (b *Bench) step(ctx context.Context, name string,
	call func(context.Context, csi.NodeClient) error) error {
	done := b.Plugin.History.Step(name)
	err := call(ctx, b.Plugin.Node())
	done(err)
	return b.Bystanders.Called(err)
}

// Close ends the driver and compares the bystanders. It returns an error if the driver fails.
func (b *Bench) Close() error { return errors.Join(b.Plugin.Stop(), b.Bystanders.Close()) }

// Formats counts the runs of mkfs on a disk. Its value is the path of a file to which each run
// adds a line.
type Formats string

// CountFormats puts wrapper programs into a directory that comes first in a driver's PATH.
// Each adds a line to the file if it is given a disk, and then runs the real mkfs of the same name.
func CountFormats(bin string) (Formats, error) {
	file := filepath.Join(filepath.Dir(bin), "formats")
	err := errors.Join(os.MkdirAll(bin, 0o755), os.WriteFile(file, nil, 0o600))
	for _, mkfs := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
		real, missing := exec.LookPath(mkfs)
		script := fmt.Sprintf("#!/bin/sh\ncase $* in */fd/*|*/dev/*) echo %s \"$@\" >>'%s';; esac\n"+
			"exec '%s' \"$@\"\n", mkfs, file, real)
		err = errors.Join(err, missing, os.WriteFile(filepath.Join(bin, mkfs), []byte(script), 0o755))
	}
	return Formats(file), err
}

// Count returns how many times a mkfs was run.
func (f Formats) Count() (int, error) {
	text, err := os.ReadFile(string(f))
	return bytes.Count(text, []byte("\n")), err
}
