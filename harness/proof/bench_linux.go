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
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
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

// Do makes a call of a placement to the driver, and then checks the bystanders.
func (b *Bench) Do(ctx context.Context, name string,
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

// RackBystanders are the bystanders of an instance of a rack. An administrator made these
// disks.
type RackBystanders struct {
	*Bystanders
	// ids are the IDs of the disks.
	ids []string
}

// NewRackBystanders creates the disks and attaches them to an instance that runs. The result can be
// closed after an error, too.
func NewRackBystanders(ctx context.Context, rack *harness.Rack, instance string, member Member,
	count *Invariant) (b *RackBystanders, err error) {
	b = &RackBystanders{}
	defer harness.Catch(&err)
	var files [bystanders]string
	for i := range files {
		disk := harness.Got(rack.CreateDisk(ctx, rack.Project,
			fmt.Sprintf("bystander-%s-%d", instance, i), harness.GiB))
		b.ids, files[i] = append(b.ids, disk.Id), DiskFile(rack, disk.Id)
	}
	b.Bystanders = harness.Got(NewBystanders(ctx, rack.Dir+"-bystanders-"+instance, files, member,
		count))
	for _, id := range b.ids {
		harness.Must(rack.AttachDisk(ctx, id, rack.Instance(instance).ID))
	}
	return b, b.Resume(ctx)
}

// DiskFile returns the path of the backing file of a disk.
func DiskFile(rack *harness.Rack, id string) string {
	return filepath.Join(rack.Dir, "sim", "disks", id+".img")
}

// Has reports whether a disk of the rack is a bystander.
func (b *RackBystanders) Has(id string) bool { return slices.Contains(b.ids, id) }

// Resume mounts the first disk after Suspend, as soon as the disk is attached.
func (b *RackBystanders) Resume(ctx context.Context) error {
	return harness.Await(ctx, 20*time.Second, b.Mount)
}

// Environment is a rack with its drivers, and with bystanders in one of its instances. After a
// trial without failures, the next trial uses it again.
type Environment struct {
	*harness.Environment
	Proof *Proof
	// Bystanders are other disks of an instance, which no call may change.
	Bystanders *RackBystanders
}

// StartEnvironment starts a rack. The instance gets bystanders, unless its name is empty.
func (p *Proof) StartEnvironment(ctx context.Context, run *harness.Run,
	options harness.RackOptions, instance string, member Member) (*Environment, error) {
	started, err := run.StartEnvironment(ctx, options)
	env := &Environment{Environment: started, Proof: p, Bystanders: &RackBystanders{}}
	if err == nil && instance != "" {
		env.Bystanders, err = NewRackBystanders(ctx, env.Rack, instance, member, p.Bystanders)
	}
	return env, err
}

// Close compares the bystanders, and stops the drivers and the rack. It returns an error if one of
// them fails or leaves something behind.
func (e *Environment) Close() error {
	return errors.Join(e.Bystanders.Close(), e.Environment.Close())
}

// Abandon kills all processes after a failure, and releases their mounts and devices. The files
// remain until the run ends.
func (e *Environment) Abandon(ctx context.Context) error {
	errs := []error{e.Bystanders.Suspend()}
	for _, plugin := range e.Plugins {
		plugin.Kill()
	}
	e.Rack.Kill()
	errs = append(errs, EndMountsBelow(e.Rack.Dir))
	_, err := loopdev.DetachBelow(ctx, e.Rack.Dir)
	return errors.Join(append(errs, err)...)
}
