// Package driver serves Oxide disks as volumes of the Container Storage Interface.
//
// docs/life-of-a-volume.md shows what the calls do to a disk, docs/data-safety.md the rules that
// they keep, and ARCHITECTURE.md the packages, with the path of a call through them. No step needs
// what an earlier one kept in memory: the rack, sysfs and the kernel's mount tables have the state,
// so any process may be killed at any point, and a repeated call continues from there.
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

// Main is oxide-csi-plugin: it runs the program that the arguments name until ctx ends, and returns
// the exit status: 0, 1 for an error, or 2 and 3 for the findings of an audit or a doctor.
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

type program func(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) (status int, err error)

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
