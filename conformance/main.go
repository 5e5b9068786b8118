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
	verb := verbs[strings.TrimPrefix(name, "--")]
	if verb == nil {
		p.complain(fmt.Errorf("there is no %q; the verbs are preflight, run, clean, diff, demo, "+
			"version and help", name))
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

func versionVerb(_ context.Context, p *Program, args []string) (int, error) {
	if len(args) > 0 {
		return ExitUsage, fmt.Errorf("version takes no arguments; found %q", args[0])
	}
	p.say("%s", p.Version)
	return ExitConforms, nil
}

func demoVerb(ctx context.Context, p *Program, args []string) (int, error) {
	if len(args) > 0 {
		return ExitUsage, fmt.Errorf("demo takes no arguments; found %q", args[0])
	}
	var in io.Reader
	if p.Getenv("PAUSE") != "" {
		in = p.Stdin
	}
	if err := Demo(ctx, in, p.Stdout, p.Self); err != nil {
		return ExitFails, fmt.Errorf("demo: %w", err)
	}
	return ExitConforms, nil
}
