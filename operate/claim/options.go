package claim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// The verbs of the command.
const (
	Grow   = "grow"
	Revert = "revert"
	Forget = "forget"
)

// Options are the options of a change.
type Options struct {
	Verb, Namespace, Claim string
	Size                   string // of the new disk; a revert keeps the size if it is empty
	Snapshot               string // to which the claim is reverted
	SnapshotClass          string // of the snapshot that a growth takes; empty for the only one
	DryRun, Continue, Undo bool
	IgnoreCapacity         bool          // begin although too little capacity is published
	Timeout                time.Duration // of each step

	// Kubectl runs kubectl.
	Kubectl func(ctx context.Context, stdin []byte, args ...string) ([]byte, error)
	// Poll is the time between two reads of the cluster; zero means a second.
	Poll time.Duration
}

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Size, "size", "", "`SIZE` of the new disk, such as 200Gi")
	flags.StringVar(&o.Snapshot, "snapshot", "", "`NAME` of the VolumeSnapshot to revert to")
	flags.StringVar(&o.SnapshotClass, "snapshot-class", "", "`NAME` of the VolumeSnapshotClass, if "+
		"there are several")
	flags.BoolVar(&o.DryRun, "dry-run", false, "show the steps, and change nothing")
	flags.BoolVar(&o.IgnoreCapacity, "ignore-capacity", false, "begin although the cluster publishes "+
		"less capacity than the change needs")
	flags.BoolVar(&o.Continue, "continue", false, "go on with the change that is under way")
	flags.BoolVar(&o.Undo, "undo", false, "undo the change that is under way")
	flags.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "`DURATION` that a step may wait")
}

// Parse sets the verb and the claim from the arguments that are no flags, and checks the options.
func (o *Options) Parse(operands []string) error {
	if len(operands) != 2 {
		return errors.New("expected grow, revert or forget, and NAMESPACE/NAME")
	}
	o.Verb = operands[0]
	o.Namespace, o.Claim, _ = strings.Cut(operands[1], "/")
	resumes := o.Continue || o.Undo
	given := o.Size != "" || o.Snapshot != "" || o.SnapshotClass != "" || o.IgnoreCapacity
	switch {
	case o.Verb != Grow && o.Verb != Revert && o.Verb != Forget:
		return errors.New("expected grow, revert or forget, and NAMESPACE/NAME")
	case !kube.IsName(o.Namespace) || !kube.IsName(o.Claim):
		return errors.New("the claim has to be NAMESPACE/NAME")
	case o.Continue && o.Undo:
		return errors.New("--continue and --undo exclude each other")
	case (resumes || o.Verb == Forget) && given:
		return errors.New("the change that is under way has its size and its snapshot, and its " +
			"capacity has been checked: omit them")
	case o.Verb == Forget && resumes:
		return errors.New("forget can be repeated, and needs neither --continue nor --undo")
	case o.Timeout <= 0:
		return errors.New("--timeout has to be positive")
	case resumes || o.Verb == Forget:
		return nil
	case o.Verb == Grow && (o.Size == "" || o.Snapshot != ""):
		return errors.New("grow needs --size, and no --snapshot: it takes one")
	case o.Verb == Revert && (!kube.IsName(o.Snapshot) || o.SnapshotClass != ""):
		return errors.New("revert needs --snapshot, the name of a VolumeSnapshot of the claim, and " +
			"no --snapshot-class")
	case o.SnapshotClass != "" && !kube.IsName(o.SnapshotClass):
		return errors.New("--snapshot-class has to be the name of a VolumeSnapshotClass")
	case o.Size == "":
		return nil
	}
	if _, err := parseSize(o.Size); err != nil {
		return fmt.Errorf("--size: %w", err)
	}
	return nil
}
