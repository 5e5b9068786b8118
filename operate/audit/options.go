package audit

import (
	"errors"
	"flag"
	"strings"
	"time"
)

// Options are the options of an audit.
type Options struct {
	Volumes string // a file with the wanted volumes, "-" for standard input
	Kubectl bool   // run kubectl instead

	// MinAge is how old an object has to be when the list is made in order to be judged: the clocks of
	// the rack and of the list differ, and the orchestrator needs a while to record a volume.
	MinAge time.Duration

	StateFile   string // a file; empty keeps no state
	Delete      bool
	OlderThan   time.Duration
	MinInterval time.Duration
	AtMost      int // how many orphans may be deleted at once; if there are more, none is
	// AssumeNone are the kinds of which the cluster has none, as the operator asserts, so that every
	// one on the rack is an orphan.
	AssumeNone map[Kind]bool

	JSON bool
}

const (
	defaultOlderThan   = 24 * time.Hour
	defaultMinInterval = time.Hour
	// minAge is the minimum of both, and the default of MinAge. An orchestrator may take that long to
	// record a volume that has just been made.
	minAge = 10 * time.Minute
	// defaultAtMost is small, because an incomplete list makes many orphans.
	defaultAtMost = 10
)

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Volumes, "volumes", "", "`FILE` with the wanted volumes: one volume or "+
		"snapshot handle per line, or the output of kubectl get -o json; - is standard input")
	flags.BoolVar(&o.Kubectl, "kubectl", false, "read the wanted volumes from kubectl's current "+
		"cluster")
	flags.DurationVar(&o.MinAge, "min-age", minAge, "minimum `AGE` of an object to judge, when the "+
		"list was made: a younger one may not be in it yet")
	flags.Func("output", "`FORMAT` of the report: table (the default) or json",
		func(value string) error {
			o.JSON = value == "json"
			if value != "json" && value != "table" {
				return errors.New("has to be table or json")
			}
			return nil
		})
	flags.StringVar(&o.StateFile, "state-file", "", "`FILE` that records when each orphan was first "+
		"seen; read and rewritten")
	flags.BoolVar(&o.Delete, "delete", false, "delete orphans that are old enough, detached, and "+
		"were seen by an earlier audit; needs --state-file and OXIDE_CLUSTER_ID")
	flags.DurationVar(&o.OlderThan, "older-than", defaultOlderThan, "minimum `AGE` of an orphan to "+
		"delete, at least 10m")
	flags.DurationVar(&o.MinInterval, "min-interval", defaultMinInterval, "minimum `TIME` since an "+
		"audit first saw the orphan, at least 10m")
	flags.IntVar(&o.AtMost, "at-most", defaultAtMost, "delete at most `N` orphans; if there are "+
		"more, delete none, because the list may be incomplete")
	flags.Func("assume-none", "`KINDS` of which the cluster has none: volumes, snapshots, or "+
		"volumes,snapshots", o.setAssumeNone)
}

func (o *Options) setAssumeNone(value string) error {
	o.AssumeNone = map[Kind]bool{}
	for word := range strings.SplitSeq(value, ",") {
		kind, ok := map[string]Kind{"volumes": kindDisk, "snapshots": kindSnapshot}[word]
		if !ok {
			return errors.New("has to be volumes, snapshots, or volumes,snapshots")
		}
		o.AssumeNone[kind] = true
	}
	return nil
}

// Check reports missing and contradictory options, for a cluster with that id.
func (o *Options) Check(clusterID string) error {
	switch {
	case o.Kubectl == (o.Volumes != ""):
		return errors.New("audit: set exactly one of --volumes FILE and --kubectl, which name the " +
			"wanted volumes")
	case o.MinAge < 0:
		return errors.New("audit: --min-age must not be negative")
	case !o.Delete:
		return nil
	case clusterID == "":
		// Two clusters without an id look alike on the rack, and the list of one lacks the volumes of the
		// other.
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id) is not set: --delete needs it to " +
			"distinguish this cluster's disks from another's")
	case o.StateFile == "":
		return errors.New("audit: --delete needs --state-file, because it deletes only what an earlier " +
			"audit saw too")
	case o.OlderThan < minAge, o.MinInterval < minAge:
		return errors.New("audit: --older-than and --min-interval have to be at least 10m, because the " +
			"orchestrator may not have recorded a new volume yet")
	case o.AtMost < 1:
		return errors.New("audit: --at-most has to be at least 1; omit --delete to delete none")
	}
	return nil
}
