package audit

import (
	"errors"
	"flag"
	"slices"
	"time"
)

// Options are the options of an audit.
type Options struct {
	Volumes string // a file with the wanted volumes, "-" for standard input
	Kubectl bool   // run kubectl instead

	// MinAge is how old an object has to be when the list is made in order to be judged: the clocks of
	// the rack and of the list differ, and the orchestrator needs a while to record a volume.
	MinAge time.Duration

	Delete string // a file with the orphans to delete; empty deletes nothing
	Output string // table, json or pv
}

// defaultMinAge is how long an orchestrator may take to record a volume that has just been made.
const defaultMinAge = 10 * time.Minute

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Volumes, "volumes", "", "`FILE` with the wanted volumes: one volume or "+
		"snapshot handle per line, or the output of kubectl get -o json; - is standard input")
	flags.BoolVar(&o.Kubectl, "kubectl", false, "read the wanted volumes from kubectl's current "+
		"cluster")
	flags.DurationVar(&o.MinAge, "min-age", defaultMinAge, "minimum `AGE` of an object to judge, "+
		"when the list was made: a younger one may not be in it yet")
	o.Output = "table"
	flags.Func("output", "`FORMAT` of the report: table (the default), json, or pv: manifests with "+
		"which a cluster has the orphans again",
		func(value string) error {
			o.Output = value
			if !slices.Contains([]string{"table", "json", "pv"}, value) {
				return errors.New("has to be table, json or pv")
			}
			return nil
		})
	flags.StringVar(&o.Delete, "delete", "", "delete the orphans in `FILE`: a report of --output "+
		"json in which you left only those; needs --kubectl and OXIDE_CLUSTER_ID")
}

// Check reports missing and contradictory options, for a cluster with that id.
func (o *Options) Check(clusterID string) error {
	switch {
	case o.Kubectl == (o.Volumes != ""):
		return errors.New("audit: set exactly one of --volumes FILE and --kubectl, which name the " +
			"wanted volumes")
	case o.MinAge < 0:
		return errors.New("audit: --min-age must not be negative")
	case o.Delete != "" && !o.Kubectl:
		return errors.New("audit: --delete needs --kubectl: only the exit status of kubectl shows that " +
			"the list is complete; without Kubernetes delete by hand (oxide disk delete)")
	case o.Delete != "" && o.Output == "pv":
		return errors.New("audit: --output pv is for what is kept: leave out --delete")
	case o.Delete != "" && clusterID == "":
		// Two clusters without an id look alike on the rack, and the list of one lacks the volumes of the
		// other.
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id) is not set: --delete needs it to " +
			"distinguish this cluster's disks from another's")
	}
	return nil
}
