package driver

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// AuditConfig is what an operator says to an audit. ParseAuditConfig fills it; of Config it uses
// what describes the rack.
type AuditConfig struct {
	Config

	Volumes string // a file of what the driver is told of, "-" for standard input
	Kubectl bool   // ask kubectl instead

	Sightings string // a file; empty remembers nothing
	Delete    bool
	OlderThan time.Duration
	Between   time.Duration
	AtMost    int // how many one audit may delete; when there are more, none is
	// NoneTold are the kinds of which the operator says that there is none, so that every one on
	// the rack is an orphan.
	NoneTold map[objectKind]bool

	JSON bool
}

const (
	defaultOlderThan = 24 * time.Hour
	defaultBetween   = time.Hour
	// leastPatience is the least of both. An orchestrator takes that long to write down a volume
	// that has just been made.
	leastPatience = 10 * time.Minute
	// defaultAtMost is small: a list of which a part is missing makes many orphans.
	defaultAtMost = 10
)

// rackSettings are the settings of the plugin that an audit has too.
var rackSettings = []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_PROJECT",
	"OXIDE_CLUSTER_ID", "OXIDE_CA_FILE"}

// ParseAuditConfig reads the arguments after "audit" and the environment, as ParseConfig does for
// the plugin.
func ParseAuditConfig(args []string, getenv func(string) string, help io.Writer) (AuditConfig,
	error) {
	c := AuditConfig{OlderThan: defaultOlderThan, Between: defaultBetween,
		AtMost: defaultAtMost}
	values := map[string]string{}
	flags := auditFlags(&c, values)
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		printAuditHelp(help, flags)
		return c, err
	case err != nil:
		return c, fmt.Errorf("audit: %s; see audit --help", csierr.Plain(err.Error()))
	case flags.NArg() > 0:
		return c, fmt.Errorf("audit: expected flags only, found %d other arguments; see audit --help",
			flags.NArg())
	}
	for _, s := range settings {
		if !slices.Contains(rackSettings, s.env) {
			continue
		}
		value := s.value(values, getenv)
		if value == "" {
			continue
		}
		if err := s.set(&c.Config, value); err != nil {
			return c, fmt.Errorf("%s: %w", s.name(), err)
		}
	}
	return c, c.complete()
}

func auditFlags(c *AuditConfig, values map[string]string) *flag.FlagSet {
	flags := flag.NewFlagSet("audit", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&c.Volumes, "volumes", "", "`FILE` with the volumes that somebody wants: a "+
		"volume or snapshot handle in each line, or what kubectl prints with -o json; - is standard "+
		"input")
	flags.BoolVar(&c.Kubectl, "kubectl", false, "ask the cluster that kubectl speaks to")
	flags.Func("output", "`FORMAT` of the report: table (the default) or json",
		func(value string) error {
			c.JSON = value == "json"
			if value != "json" && value != "table" {
				return errors.New("has to be table or json")
			}
			return nil
		})
	flags.StringVar(&c.Sightings, "sightings", "", "`FILE` that keeps which orphans were seen when; "+
		"it is read and written anew")
	flags.BoolVar(&c.Delete, "delete", false, "delete orphans that are old enough, detached, and "+
		"were seen by an earlier audit; needs --sightings and OXIDE_CLUSTER_ID")
	flags.DurationVar(&c.OlderThan, "older-than", defaultOlderThan, "how old an orphan has to be "+
		"to be deleted, `AGE`, at least 10m")
	flags.DurationVar(&c.Between, "between", defaultBetween, "how long ago an earlier audit has to "+
		"have seen it, `TIME`, at least 10m")
	flags.IntVar(&c.AtMost, "at-most", defaultAtMost, "how many orphans may be deleted at once, "+
		"`N`; when there are more, none is, for the list may lack a part")
	flags.Func("none-told", "`KINDS` that the cluster has none of, as you know: volumes, snapshots, "+
		"or volumes,snapshots", c.setNoneTold)
	for _, s := range settings {
		if s.flag != "" && slices.Contains(rackSettings, s.env) {
			flags.Func(s.flag, s.usage+" [$"+s.env+"]", func(value string) error {
				values[s.flag] = value
				return nil
			})
		}
	}
	return flags
}

func (c *AuditConfig) setNoneTold(value string) error {
	c.NoneTold = map[objectKind]bool{}
	for word := range strings.SplitSeq(value, ",") {
		kind, ok := map[string]objectKind{"volumes": kindDisk, "snapshots": kindSnapshot}[word]
		if !ok {
			return errors.New("has to be volumes, snapshots, or volumes,snapshots")
		}
		c.NoneTold[kind] = true
	}
	return nil
}

// complete says what is missing, and what does not go together.
func (c *AuditConfig) complete() error {
	switch {
	case c.Host == "":
		return errors.New("OXIDE_HOST (--host) is not set: the audit needs the rack's address")
	case c.Token == "" && c.TokenFile == "":
		return errors.New("OXIDE_TOKEN is not set, nor OXIDE_TOKEN_FILE: the audit needs a token of " +
			"the rack")
	case c.Project == "":
		return errors.New("OXIDE_PROJECT (--project) is not set: the audit needs a project")
	case c.Kubectl == (c.Volumes != ""):
		return errors.New("audit: say which volumes are wanted, with --volumes FILE or --kubectl, one " +
			"of the two")
	case !c.Delete:
		return nil
	case c.ClusterID == "":
		// Two clusters without an id look alike on the rack, and the one's list says nothing of the
		// other's volumes.
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id) is not set: without it nobody can tell " +
			"this cluster's disks from another's, so --delete does not go without")
	case c.Sightings == "":
		return errors.New("audit: --delete needs --sightings: only what an earlier audit saw too is " +
			"deleted")
	case c.OlderThan < leastPatience, c.Between < leastPatience:
		return errors.New("audit: --older-than and --between are at least 10m: a volume that was " +
			"just made may not be written down yet")
	case c.AtMost < 1:
		return errors.New("audit: --at-most has to be at least 1; leave --delete away to delete none")
	}
	return nil
}

func printAuditHelp(w io.Writer, flags *flag.FlagSet) {
	_, _ = fmt.Fprintln(w, "oxide-csi-plugin audit compares what the driver made on the rack for "+
		"this cluster with the volumes that somebody wants.\nExit status: 0 nothing found, 2 orphans "+
		"or missing volumes found, 1 error.")
	flags.VisitAll(func(f *flag.Flag) {
		name, usage := flag.UnquoteUsage(f)
		left := strings.TrimSpace("--" + f.Name + " " + name)
		if f.DefValue != "" && f.DefValue != "false" {
			usage += " (default " + f.DefValue + ")"
		}
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", left, usage)
	})
	_, _ = fmt.Fprintf(w, "  %-24s %s\n", "$OXIDE_TOKEN", "the rack's token")
}
