// Package driver serves Oxide disks as volumes of the Container Storage Interface.
//
// # The life of a volume
//
// A volume begins with a name that the orchestrator chose. CreateVolume derives the disk's name
// from it, a hash of exactly 20 bytes, and creates the disk on the rack. It reads nothing before
// for a blank disk, and only the source for a disk from a snapshot or an image. If the rack refuses
// the name as taken, the driver reads the disk and compares it with the request. The disk's UUID
// becomes the volume's id. volume_context carries the name, because the guest sees it: an NVMe
// controller's serial number holds the first 20 bytes of the disk's name.
//
// ControllerPublishVolume attaches the disk to the node's instance. The rack responds with the
// disk, and the driver accepts the response only if the disk is attached there. Name and size go
// into publish_context. A disk made by hand may have any name, so before the attach the driver
// checks that no other disk of the instance would show the same serial. If the instance has to be
// stopped for an attach the error says so: the driver never stops an instance.
//
// On the node, NodeStageVolume waits for the device with that serial, verifies that it is the only
// one, and keeps it open until it is mounted. It mounts a disk that holds one whole filesystem. It
// formats only a disk that is proven blank: it has the size that the controller passed on, nobody
// holds it, neither blkid nor the driver's own list of signatures knows its content, and it is zero
// in every region where a filesystem, a partition table, a volume manager, a RAID, encryption or
// swap keeps its signature. Before mkfs it writes a format-in-progress record of the volume to the
// disk, where no mkfs writes, and erases it when mkfs's work is durable: an interrupted format is
// recognized as this volume's and repeated, unless the filesystem has been used since. Then it
// grows a filesystem that is smaller than its disk (ext under a record of the same kind) and mounts
// it at the staging path. NodePublishVolume binds the mount, or the device for raw block volumes,
// to each workload's path.
//
// The way back undoes each step: unpublish, unstage, detach, delete. Each call succeeds if there is
// nothing to undo. Before it unmounts a volume the node searches every mount namespace that it can
// see: if a process has the volume mounted there, the call fails and the error names the process.
// No unmount is lazy. The driver deletes only a disk or snapshot with this cluster's ownership tag
// and the name that the tag stands for; it reads both right before the deletion and refuses any
// other object. Missing information never counts as absence: a rack that shows the token no project
// is an error, and so is a device that does not report whether it is in use.
//
// No step needs what an earlier one kept in memory. The rack, sysfs and the kernel's mount tables
// have the state, so any process may be killed at any point, and a repeated call continues from
// there. A node does keep volume records in a state directory: the calls that undo something get
// only an id and a path, from which the kernel cannot find a device that is not mounted. Volume
// records make answers stricter, and no call needs one.
//
// A disk leaks when the caller of its create never repeats the call. Audit finds such orphans by
// the ownership tag of every disk and snapshot, and deletes them on request if an earlier audit saw
// them too. Doctor walks a volume's chain from the claim to the mounts and explains the first link
// that is broken; Inspect is what it asks of a node.
//
// # The path of a call
//
// Each RPC parses its request, does one thing, and builds its response. The rest has one place
// each: interceptors log without secrets, count, recover panics, enforce CSI's field limits and
// admit one call at a time for each object (interceptor.go); package csierr has the reasons of
// errors with their gRPC codes; package volume the names and ids of the orchestrator and of the
// rack; package rack validates the rack's responses.
package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/oxidecomputer/oxide-csi-plugin/operate/claim"
)

// Main is oxide-csi-plugin: it does what the arguments and the environment say until ctx ends, and
// returns the exit status: 0, 1 for an error, or what an audit or a doctor has found.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) int {
	status, err := mainErr(ctx, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "oxide-csi-plugin:", err)
		return 1
	}
	return status
}

// program does what its arguments and the environment say, and returns the exit status.
type program func(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) (status int, err error)

// programOf returns a program that parses its configuration and runs with it.
func programOf[C any](parse func([]string, func(string) string, io.Writer) (C, error),
	run func(ctx context.Context, c C, stdout, stderr io.Writer) (int, error)) program {
	return func(ctx context.Context, args []string, getenv func(string) string,
		stdout, stderr io.Writer) (int, error) {
		config, err := parse(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		return run(ctx, config, stdout, stderr)
	}
}

// subcommands are the programs beside the plugin, by their names.
var subcommands = map[string]program{
	auditCommand.name: programOf(ParseAuditConfig, func(ctx context.Context, c AuditConfig,
		stdout, stderr io.Writer) (int, error) {
		found, err := Audit(ctx, c, stdout, stderr)
		if found {
			return 2, err
		}
		return 0, err
	}),
	claimCommand.name: programOf(ParseClaimConfig, func(ctx context.Context, o claim.Options,
		stdout, _ io.Writer) (int, error) {
		return 0, Claim(ctx, o, stdout)
	}),
	doctorCommand.name: programOf(ParseDoctorConfig, func(ctx context.Context, c DoctorConfig,
		stdout, _ io.Writer) (int, error) {
		return Doctor(ctx, c, stdout)
	}),
	inspectCommand.name: programOf(ParseInspectConfig, func(_ context.Context, c InspectConfig,
		stdout, _ io.Writer) (int, error) {
		return 0, Inspect(c, stdout)
	}),
	readyCommand.name: programOf(ParseReadyConfig, func(ctx context.Context, c Config,
		_, _ io.Writer) (int, error) {
		return 0, Ready(ctx, c)
	}),
	prestopCommand.name: programOf(ParsePrestopConfig, func(ctx context.Context, c PrestopConfig,
		stdout, _ io.Writer) (int, error) {
		return 0, Prestop(ctx, c, stdout)
	}),
}

func mainErr(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) (status int, err error) {
	if len(args) > 0 {
		if run, ok := subcommands[args[0]]; ok {
			return run(ctx, args[1:], getenv, stdout, stderr)
		}
	}
	config, err := ParseConfig(args, getenv, stdout)
	switch {
	case err != nil:
		return 0, err
	case config.PrintVersion:
		_, err := fmt.Fprintln(stdout, Version())
		return 0, err
	}
	return 0, Run(ctx, config, stderr)
}

// Release is set in release builds: -ldflags "-X <this package>.Release=v1.2.3".
var Release = ""

// clientVersion is the version of Oxide's client in this program.
func clientVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		if module.Path == "github.com/oxidecomputer/oxide.go" {
			return module.Version
		}
	}
	return ""
}

// Version returns the release, or the version of the main module from the build information.
func Version() string {
	if Release != "" {
		return Release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
