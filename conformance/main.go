// Package conformance is the program oxide-conformance. It tests whether a rack does what the
// driver needs, and whether data on the rack's disks survives.
//
// The program runs inside an instance of the rack, as one file that contains the driver. [Main]
// runs the command line. Each verb has a file of its name: preflight examines the rack and the
// machine before a run, run runs, clean removes the remains of a dead run, diff compares the
// reports of two runs, and demo shows the life of a volume on a simulated rack.
//
// A run has parts, in this order: the rules of the API (package rules); csi-sanity over ext4,
// xfs, btrfs and raw block (package csisuite); and data that is written, moved and read back
// (package data). It ends in a [report.Report] with a verdict, which is also the exit status.
//
// Nothing that did not run counts as passed. A part or a spec is blocked if the rack keeps
// everybody from running it, and not applicable if the driver does not offer the feature. A spec
// that made none of the calls that it is about has failed, even if it reports success
// (verdict.go).
//
// Every object that a run creates carries the run's mark. A disk that is created first and
// deleted last records who runs it, where, and in which instances. So clean finds everything that
// belongs to a run, and nothing else.
package conformance

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// These are the exit statuses of the program.
const (
	ExitConforms    = 0
	ExitFails       = 1
	ExitUsage       = 2
	ExitBlocked     = 3
	ExitInterrupted = 130
)

// Program is one start of the program.
type Program struct {
	Args           []string // without its name
	Getenv         func(string) string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Version is the version of the suite and of the driver.
	Version string
	// Self has the commands that start the programs inside this one: oxide-csi-plugin,
	// oxide-simulator and the agent for other instances.
	Self map[string][]string
}

// verbs are the verbs of the command line.
var verbs = map[string]func(context.Context, *Program, []string) (int, error){
	"preflight": preflightVerb,
	"run":       runVerb,
	"clean":     cleanVerb,
	"diff":      diffVerb,
	"demo":      demoVerb,
	"version":   versionVerb,
}

// Main runs the command line and returns the exit status.
func (p *Program) Main(ctx context.Context) int {
	p.Stdout, p.Stderr = report.PlainWriter{To: p.Stdout}, report.PlainWriter{To: p.Stderr}
	if len(p.Args) == 0 {
		printHelp(p.Stderr)
		return ExitUsage
	}
	name, args := p.Args[0], p.Args[1:]
	if name == "help" || slices.ContainsFunc(p.Args, asksForHelp) {
		printHelp(p.Stdout)
		return ExitConforms
	}
	name = strings.TrimPrefix(name, "--")
	verb := verbs[name]
	if verb == nil {
		p.complain(fmt.Errorf("there is no %q; the verbs are preflight, run, clean, diff, demo, "+
			"version and help", p.Args[0]))
		return ExitUsage
	}
	if len(args) > 0 && (name == "demo" || name == "version") {
		p.complain(fmt.Errorf("%s takes no arguments; found %q", name, args[0]))
		return ExitUsage
	}
	status, err := verb(ctx, p, args)
	if err != nil {
		p.complain(err)
	}
	return status
}

// asksForHelp recognizes a help flag, which every verb accepts.
func asksForHelp(arg string) bool { return slices.Contains([]string{"-h", "-help", "--help"}, arg) }

// complain prints an error in one line.
func (p *Program) complain(err error) {
	fmt.Fprintln(p.Stderr, "oxide-conformance:", strings.ReplaceAll(err.Error(), "\n", "; "))
}

func (p *Program) say(format string, args ...any) { fmt.Fprintf(p.Stdout, format+"\n", args...) }

func versionVerb(_ context.Context, p *Program, _ []string) (int, error) {
	p.say("%s", p.Version)
	return ExitConforms, nil
}

func demoVerb(ctx context.Context, p *Program, _ []string) (int, error) {
	var in io.Reader
	if p.Getenv("PAUSE") != "" {
		in = p.Stdin
	}
	if err := Demo(ctx, in, p.Stdout, p.Self); err != nil {
		return ExitFails, fmt.Errorf("demo: %w", err)
	}
	return ExitConforms, nil
}

// diffVerb compares two reports.
func diffVerb(_ context.Context, p *Program, args []string) (int, error) {
	if len(args) != 2 {
		return ExitUsage, fmt.Errorf("diff takes two reports, each a folder or its report.json; "+
			"found %d arguments", len(args))
	}
	var both [2]*report.Report
	for i, path := range args {
		var err error
		if both[i], err = report.Read(path); err != nil {
			return ExitUsage, err
		}
	}
	text, worse := report.Diff(both[0], both[1])
	p.say("%s", text)
	if worse {
		return ExitFails, nil
	}
	return ExitConforms, nil
}
