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
)

// Main is oxide-csi-plugin: it runs the program that the arguments name until ctx ends, and returns
// the exit status: 0, 1 for an error, or 2 and 3 for the findings of an audit or a doctor.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) int {
	status, err := runProgram(ctx, invocation{args, getenv, stdout, stderr})
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "oxide-csi-plugin:", err)
		return 1
	}
	return status
}

// invocation is what a program was started with.
type invocation struct {
	args           []string
	getenv         func(string) string
	stdout, stderr io.Writer
}

var subcommands = map[string]func(context.Context, invocation) (status int, err error){
	auditCommand.name:   runAudit,
	claimCommand.name:   runClaim,
	doctorCommand.name:  runDoctor,
	inspectCommand.name: runInspect,
	readyCommand.name:   runReady,
	prestopCommand.name: runPrestop,
}

func runProgram(ctx context.Context, in invocation) (status int, err error) {
	if len(in.args) > 0 {
		if subcommand, ok := subcommands[in.args[0]]; ok {
			in.args = in.args[1:]
			return subcommand(ctx, in)
		}
	}
	config, err := ParseConfig(in.args, in.getenv, in.stdout)
	switch {
	case err != nil:
		return 0, err
	case config.PrintVersion:
		_, err := fmt.Fprintln(in.stdout, Version())
		return 0, err
	}
	return 0, Run(ctx, config, in.stderr)
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
