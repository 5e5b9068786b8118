// Package conformance is the program oxide-conformance. It tests whether a rack does what the
// driver needs, and whether data on the rack's disks survives.
//
// The program runs inside an instance of the rack, as one file that contains the driver. [Main]
// runs the command line.
//
// A run has parts, in this order: the rules of the API (package rules); csi-sanity over ext4, xfs,
// btrfs and raw block (package csisuite); and data that is written, moved and read back (package
// data). It ends in a [report.Report] with a verdict, which decides the exit status.
//
// A part or a spec that did not run never counts as passed. It is blocked if the rack cannot attach
// disks to running instances, and not applicable if the driver does not offer the feature. A spec
// that passes without calling the RPC in its name counts as failed (parts.go).
//
// Every object that a run creates carries the run's mark. One disk, which is created first and
// deleted last, records the run's process, its host and its instances. So the verb clean finds
// everything that belongs to a run, and nothing else.
package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// These are the exit statuses of the program.
const (
	ExitConforms    = 0
	ExitFails       = 1
	ExitUsage       = 2
	ExitBlocked     = 3
	ExitInterrupted = 130
)

// Program is one call of oxide-conformance.
type Program struct {
	Args           []string // without its name
	Getenv         func(string) string
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Version is the version of the suite and of the driver.
	Version string
	// Self has the commands that start the programs built into this one, by their names:
	// oxide-csi-plugin, oxide-simulator and the agent for other instances.
	Self map[string][]string
}

var verbs = map[string]func(context.Context, *Program, []string) (int, error){
	"preflight": onRackDo("preflight", preflightVerb),
	"run":       onRackDo("run", runVerb),
	"clean":     onRackDo("clean", cleanVerb),
	"diff": func(_ context.Context, p *Program, args []string) (int, error) {
		if len(args) != 2 {
			return ExitUsage, fmt.Errorf("diff takes two reports, each a folder or its report.json; "+
				"found %d arguments", len(args))
		}
		a, err := report.Read(args[0])
		if err != nil {
			return ExitUsage, err
		}
		b, err := report.Read(args[1])
		if err != nil {
			return ExitUsage, err
		}
		text, worse := report.Diff(a, b)
		p.say("%s", text)
		if worse {
			return ExitFails, nil
		}
		return ExitConforms, nil
	},
	"demo": func(ctx context.Context, p *Program, _ []string) (int, error) {
		var in io.Reader
		if p.Getenv("PAUSE") != "" {
			in = p.Stdin
		}
		if err := Demo(ctx, in, p.Stdout, p.Self); err != nil {
			return ExitFails, fmt.Errorf("demo: %w", err)
		}
		return ExitConforms, nil
	},
	"version": func(_ context.Context, p *Program, _ []string) (int, error) {
		p.say("%s", p.Version)
		return ExitConforms, nil
	},
}

func onRackDo(verb string, do func(context.Context, *job) (int, error),
) func(context.Context, *Program, []string) (int, error) {
	return func(ctx context.Context, p *Program, args []string) (int, error) {
		s, err := parseSettings(verb, args, p.Getenv)
		switch {
		case err != nil:
		case s.run != "" && !isRunID(s.run):
			err = fmt.Errorf("--run %s: expected the 8 hexadecimal digits of a run", s.run)
		case verb == "run":
			// A run has its own mount namespace, so that its mounts disappear if it is killed.
			err = namespace.Enter()
		}
		if err != nil {
			return ExitUsage, err
		}
		w, err := openJob(p, s)
		if err != nil {
			return ExitUsage, err
		}
		return do(ctx, w)
	}
}

// Main runs the command line and returns the exit status.
func (p *Program) Main(ctx context.Context) int {
	p.Stdout, p.Stderr = report.PlainWriter{To: p.Stdout}, report.PlainWriter{To: p.Stderr}
	if len(p.Args) == 0 {
		printHelp(p.Stderr)
		return ExitUsage
	}
	name, args := p.Args[0], p.Args[1:]
	if name == "help" || slices.ContainsFunc(p.Args, func(arg string) bool {
		return slices.Contains([]string{"-h", "-help", "--help"}, arg)
	}) {
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

func (p *Program) complain(err error) {
	fmt.Fprintln(p.Stderr, "oxide-conformance:", strings.ReplaceAll(err.Error(), "\n", "; "))
}

func (p *Program) say(format string, args ...any) { fmt.Fprintf(p.Stdout, format+"\n", args...) }

type settings struct {
	// The run passes these to its driver, which has settings of the same names.
	host, token, tokenFile, project, caFile, sysfsRoot, devRoot string

	// command has the verb and the flags without values, because --second-shell may have a password.
	command              []string
	selected             []string // the parts that run, in their order
	onlyText, budgetText string
	budget               amount
	yes                  bool // the program runs or cleans without a question
	// report is the report's folder; "" means oxide-conformance-RUN in the working directory.
	report string
	// release is the operator's name for the rack's release.
	release string
	// second and helper are the names of other instances. secondShell and guestShell are commands that
	// run a script inside them.
	second, secondShell, helper, guestShell string
	admin                                   string // the address of the admin listener
	run                                     string // the ID of the dead run that clean removes
}

// setting describes a flag and its environment variable. The flag has precedence.
type setting struct {
	flag, env, preset, usage string
	verbs                    string
	field                    *string
}

const (
	onRack  = "preflight run clean"
	running = "preflight run"
)

// all returns the settings, each with the field that it sets. The token has no flag, because the
// process list shows arguments to everybody.
func (s *settings) all() []setting {
	return []setting{
		{"host", "OXIDE_HOST", "", "the rack's address, https://silo.sys.example.com", onRack, &s.host},
		{"", "OXIDE_TOKEN", "", "the rack's token", onRack, &s.token},
		{"token-file", "OXIDE_TOKEN_FILE", "", "a file with the token; wins over OXIDE_TOKEN", onRack,
			&s.tokenFile},
		{"project", "OXIDE_PROJECT", "", "the project of this instance, in which to work", onRack,
			&s.project},
		{"ca-file", "OXIDE_CA_FILE", "", "PEM certificates to trust instead of the system's", onRack,
			&s.caFile},
		{"only", "OXIDE_CONFORMANCE_ONLY", "", "run only these parts: " + strings.Join(partNames, ","),
			running, &s.onlyText},
		{"second", "OXIDE_CONFORMANCE_SECOND", "", "another running instance of the project, to move " +
			"volumes to; it is also stopped hard and started again", running, &s.second},
		{"second-shell", "OXIDE_CONFORMANCE_SECOND_SHELL", "", "a command that runs a script in it as " +
			"root, such as 'ssh root@second'", running, &s.secondShell},
		{"helper", "OXIDE_CONFORMANCE_HELPER", "", "a stopped instance of the project, which may be " +
			"started and stopped; clean stops only this one", onRack, &s.helper},
		{"guest-shell", "OXIDE_CONFORMANCE_GUEST_SHELL", "", "a command that runs a script in the " +
			"helper as root, such as 'ssh root@helper'", running, &s.guestShell},
		{"budget", "OXIDE_CONFORMANCE_BUDGET", "20,40", "how many disks and snapshots, and how many " +
			"GiB of them, may exist at one time", running, &s.budgetText},
		{"release", "OXIDE_CONFORMANCE_RELEASE", "", "what the rack runs, in your words, for the report",
			running, &s.release},
		{"report", "OXIDE_CONFORMANCE_REPORT", "", "the folder for the report (default " +
			"oxide-conformance-RUN here)", "run", &s.report},
		{"run", "", "", "clean up after this run only", "clean", &s.run},
		{"sysfs-root", "OXIDE_SYSFS_ROOT", "/sys", "where sysfs is mounted", onRack, &s.sysfsRoot},
		{"dev-root", "OXIDE_DEV_ROOT", "/dev", "the directory of the device nodes", running, &s.devRoot},
		{"simulator-admin", "OXIDE_CONFORMANCE_SIMULATOR_ADMIN", "", "the admin listener, if the rack " +
			"is a simulated one: its request log is compared with the report", running, &s.admin},
	}
}

func (s *settings) setOnly() error {
	var only []string
	for part := range strings.SplitSeq(s.onlyText, ",") {
		switch part = strings.TrimSpace(part); {
		case part == "":
		case !slices.Contains(partNames, part):
			return fmt.Errorf("there is no part %q; the parts are %s", part, strings.Join(partNames, ", "))
		default:
			only = append(only, part)
		}
	}
	if len(only) == 0 {
		return fmt.Errorf("it selects nothing; the parts are %s", strings.Join(partNames, ", "))
	}
	s.selected = slices.DeleteFunc(slices.Clone(partNames), func(part string) bool {
		return !slices.Contains(only, part)
	})
	return nil
}

func (s *settings) setBudget() error {
	disks, gib, found := strings.Cut(s.budgetText, ",")
	n, err := strconv.Atoi(strings.TrimSpace(disks))
	g, errGiB := strconv.ParseInt(strings.TrimSpace(gib), 10, 64)
	if !found || err != nil || errGiB != nil || n < 1 || g < 1 {
		return errors.New("expected two whole numbers: disks and snapshots, and GiB, such as 20,40")
	}
	s.budget = amount{n, g}
	return nil
}

func parseSettings(verb string, args []string, getenv func(string) string) (*settings, error) {
	s := &settings{selected: partNames}
	flags := flag.NewFlagSet("oxide-conformance "+verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	all := slices.DeleteFunc(s.all(), func(o setting) bool {
		return !slices.Contains(strings.Fields(o.verbs), verb)
	})
	for _, one := range all {
		*one.field = cmp.Or(strings.TrimSpace(getenv(one.env)), one.preset)
		if one.flag != "" {
			flags.StringVar(one.field, one.flag, *one.field, one.usage)
		}
	}
	if verb == "run" || verb == "clean" {
		flags.BoolVar(&s.yes, "yes", false, "")
	}
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%s takes flags only; found %q", verb, flags.Arg(0))
	}
	given := map[string]bool{}
	s.command = []string{"oxide-conformance", verb}
	flags.Visit(func(f *flag.Flag) {
		given[f.Name], s.command = true, append(s.command, "--"+f.Name)
	})
	for _, one := range all {
		*one.field = strings.TrimSpace(*one.field)
		var err error
		switch {
		case *one.field == "" && !given[one.flag]:
		case one.flag == "only":
			err = s.setOnly()
		case one.flag == "budget":
			err = s.setBudget()
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", one.name(), err)
		}
	}
	return s, s.complete()
}

// complete reads the token's file, and fails if a setting is missing.
func (s *settings) complete() error {
	if strings.Contains(s.host, "@") { // may contain a password, so it is not printed
		return errors.New("OXIDE_HOST (--host) has an @: a rack takes a token, and no user or " +
			"password; expected https://silo.sys.example.com")
	}
	if s.caFile != "" {
		if _, err := guest.ReadFile(s.caFile); err != nil {
			return fmt.Errorf("OXIDE_CA_FILE (--ca-file): %w", err)
		}
	}
	if s.tokenFile != "" {
		token, err := guest.ReadFile(s.tokenFile)
		if err != nil {
			return fmt.Errorf("OXIDE_TOKEN_FILE (--token-file): %w", err)
		}
		s.token = strings.TrimSpace(string(token))
	}
	var missing []string
	for _, needed := range [][2]string{{"OXIDE_HOST", s.host}, {"OXIDE_PROJECT", s.project},
		{"OXIDE_TOKEN", s.token}} {
		if needed[1] == "" {
			missing = append(missing, needed[0])
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("which rack? Set %s (OXIDE_CA_FILE too if its certificate is "+
			"private), and run this as root in an instance of that project",
			strings.Join(missing, ", "))
	}
	return nil
}

func (o setting) name() string {
	if o.env == "" {
		return "--" + o.flag
	}
	if o.flag == "" {
		return o.env
	}
	return o.env + " (--" + o.flag + ")"
}

func printHelp(w io.Writer) {
	fmt.Fprint(w, helpHead)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, o := range (&settings{}).all() {
		var names []string
		if o.flag != "" {
			names = append(names, "--"+o.flag)
		}
		if o.env != "" {
			names = append(names, "$"+o.env)
		}
		usage := o.usage + " (" + o.verbs + ")"
		if o.preset != "" {
			usage += " (default " + o.preset + ")"
		}
		fmt.Fprintf(table, "  %s\t%s\n", strings.Join(names, ", "), usage)
	}
	fmt.Fprintf(table, "  --yes\tdo not ask (run clean)\n")
	_ = table.Flush()
	fmt.Fprint(w, helpTail)
}

const helpHead = `oxide-conformance tells whether a rack does what the CSI driver needs,
and whether the driver keeps your bytes on it. Run it as root in an instance of the rack.

  oxide-conformance preflight    look at the rack and this machine; nothing is made
  oxide-conformance run          create, attach, write, move and delete volumes; write a report
  oxide-conformance clean        remove what a run has left that could not do it itself
  oxide-conformance diff A B     compare two reports, each a folder or its report.json
  oxide-conformance demo         watch a volume live on a simulated rack; needs no rack
  oxide-conformance version      print the version

A flag wins over its environment variable.
`

const helpTail = `
Exit status: 0 the rack conforms; 1 it does not (diff: something is worse); 2 a mistake on the
command line or in the environment; 3 the rack blocks what is needed, such as hot-plug;
130 interrupted.
`

// prefix, followed by the run's ID, is the run's cluster ID. Reports call this ID the mark.
const prefix = "oxide-conformance-"

// mark is the description, as JSON, of every object that a run creates without its driver. The disk
// that a run creates first and deletes last has all fields; other objects have only Run.
type mark struct {
	// Run is the run's ID: 8 hexadecimal digits.
	Run string `json:"run"`
	// Host is the machine on which the program runs. PID is the program's process ID there, and Boot
	// the result of bootID.
	Host string `json:"host,omitempty"`
	PID  int    `json:"pid,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Start is the start time of the process: a later process may have the same ID.
	Start string     `json:"start,omitempty"`
	Began *time.Time `json:"began,omitempty"`
	// Instances are the IDs of the instances to which the run attaches disks, beginning with the one
	// in which it runs. Helper is the ID of the instance that it starts and stops.
	Instances []string `json:"instances,omitempty"`
	Helper    string   `json:"helper,omitempty"`
}

const markWord = "oxide-conformance "

var isRunID = regexp.MustCompile(`^[0-9a-f]{8}$`).MatchString

// whole reports whether m has all fields, as only the mark of a run's first disk has.
func (m mark) whole() bool { return m.Host != "" && m.Began != nil }

func (m mark) description() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // cannot fail: strings, a number and a time
	}
	return markWord + string(text)
}

// markOf returns the mark in a description, or the zero value if there is none.
func markOf(description string) (m mark) {
	text, ok := strings.CutPrefix(description, markWord)
	if !ok || json.Unmarshal([]byte(text), &m) != nil || !isRunID(m.Run) {
		return mark{}
	}
	return m
}

// driverWord begins the description of every object that the driver creates.
const driverWord = "csi.oxide.computer "

// runOf returns the ID of the run that created an object, or "". The run or its driver wrote the ID
// into the description. The object's name does not count, because anybody may choose such a name.
func runOf(description string) string {
	var tag struct {
		Cluster string `json:"cluster"`
	}
	text, ok := strings.CutPrefix(description, driverWord)
	if !ok || json.Unmarshal([]byte(text), &tag) != nil {
		return markOf(description).Run
	}
	if run, ok := strings.CutPrefix(tag.Cluster, prefix); ok && isRunID(run) {
		return run
	}
	return ""
}
