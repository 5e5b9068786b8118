package audit

import (
	"errors"
	"flag"
	"strings"
	"time"
)

// Options are what an operator says to an audit.
type Options struct {
	Volumes string // a file with the wanted volumes, "-" for standard input
	Kubectl bool   // ask kubectl instead

	StateFile   string // a file; empty remembers nothing
	Delete      bool
	OlderThan   time.Duration
	MinInterval time.Duration
	AtMost      int // how many one audit may delete; when there are more, none is
	// AssumeNone are the kinds of which the operator says that there is none, so that every one on
	// the rack is an orphan.
	AssumeNone map[Kind]bool

	JSON bool
}

const (
	defaultOlderThan   = 24 * time.Hour
	defaultMinInterval = time.Hour
	// minPatience is the least of both. An orchestrator takes that long to write down a volume
	// that has just been made.
	minPatience = 10 * time.Minute
	// defaultAtMost is small: a list of which a part is missing makes many orphans.
	defaultAtMost = 10
)

// Flags defines the flags that fill the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Volumes, "volumes", "", "`FILE` with the volumes that somebody wants: a "+
		"volume or snapshot handle in each line, or what kubectl prints with -o json; - is standard "+
		"input")
	flags.BoolVar(&o.Kubectl, "kubectl", false, "ask the cluster that kubectl speaks to")
	flags.Func("output", "`FORMAT` of the report: table (the default) or json",
		func(value string) error {
			o.JSON = value == "json"
			if value != "json" && value != "table" {
				return errors.New("has to be table or json")
			}
			return nil
		})
	flags.StringVar(&o.StateFile, "state-file", "", "`FILE` that keeps which orphans were seen when; "+
		"it is read and written anew")
	flags.BoolVar(&o.Delete, "delete", false, "delete orphans that are old enough, detached, and "+
		"were seen by an earlier audit; needs --state-file and OXIDE_CLUSTER_ID")
	flags.DurationVar(&o.OlderThan, "older-than", defaultOlderThan, "how old an orphan has to be "+
		"to be deleted, `AGE`, at least 10m")
	flags.DurationVar(&o.MinInterval, "min-interval", defaultMinInterval, "how long ago an earlier "+
		"audit has to "+
		"have seen it, `TIME`, at least 10m")
	flags.IntVar(&o.AtMost, "at-most", defaultAtMost, "how many orphans may be deleted at once, "+
		"`N`; when there are more, none is, for the list may lack a part")
	flags.Func("assume-none", "`KINDS` that the cluster has none of, as you know: volumes, "+
		"snapshots, "+
		"or volumes,snapshots", o.setAssumeNone)
}

func (o *Options) setAssumeNone(value string) error {
	o.AssumeNone = map[Kind]bool{}
	for word := range strings.SplitSeq(value, ",") {
		kind, ok := map[string]Kind{"volumes": Disk, "snapshots": Snapshot}[word]
		if !ok {
			return errors.New("has to be volumes, snapshots, or volumes,snapshots")
		}
		o.AssumeNone[kind] = true
	}
	return nil
}

// Check says what is missing, and what does not go together, for a cluster with that id.
func (o *Options) Check(clusterID string) error {
	switch {
	case o.Kubectl == (o.Volumes != ""):
		return errors.New("audit: say which volumes are wanted, with --volumes FILE or --kubectl, one " +
			"of the two")
	case !o.Delete:
		return nil
	case clusterID == "":
		// Two clusters without an id look alike on the rack, and the one's list says nothing of the
		// other's volumes.
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id) is not set: without it nobody can tell " +
			"this cluster's disks from another's, so --delete does not go without")
	case o.StateFile == "":
		return errors.New("audit: --delete needs --state-file: only what an earlier audit saw too is " +
			"deleted")
	case o.OlderThan < minPatience, o.MinInterval < minPatience:
		return errors.New("audit: --older-than and --min-interval are at least 10m: a volume that was " +
			"just made may not be written down yet")
	case o.AtMost < 1:
		return errors.New("audit: --at-most has to be at least 1; leave --delete away to delete none")
	}
	return nil
}
