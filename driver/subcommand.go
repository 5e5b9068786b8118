package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/claim"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// subcommand is a program of an operator beside the plugin. It has some of the plugin's settings,
// and flags of its own.
type subcommand struct {
	name, about string
	settings    []string // by their variables
	operands    string   // what the arguments without a flag are; empty if there are none
}

// rackSettings are the settings of a program that asks the rack.
var rackSettings = []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_PROJECT",
	"OXIDE_CLUSTER_ID", "OXIDE_CA_FILE"}

// parse parses the arguments and the environment into the settings and the program's own flags. It
// returns the operands, which may stand between flags. --help writes its text to help and returns
// flag.ErrHelp.
func (s subcommand) parse(c *Config, own func(*flag.FlagSet), args []string,
	getenv func(string) string, help io.Writer) (operands []string, err error) {
	flags := flag.NewFlagSet(s.name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	own(flags)
	values := addFlags(flags, s.has())
	for more := true; more; {
		switch err := flags.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			s.printHelp(help, flags)
			return nil, err
		case err != nil:
			return nil, fmt.Errorf("%s: %s; see %s --help", s.name, csierr.Plain(err.Error()), s.name)
		case flags.NArg() > 0 && s.operands == "":
			return nil, fmt.Errorf("%s: expected flags only, found %d other arguments; see %s --help",
				s.name, flags.NArg(), s.name)
		}
		if more = flags.NArg() > 0; more {
			operands, args = append(operands, flags.Arg(0)), flags.Args()[1:]
		}
	}
	return operands, c.apply(s.has(), values, getenv)
}

// has returns the settings that the program has.
func (s subcommand) has() []setting {
	return slices.DeleteFunc(slices.Clone(settings), func(t setting) bool {
		return !slices.Contains(s.settings, t.env)
	})
}

func (s subcommand) printHelp(w io.Writer, flags *flag.FlagSet) {
	_, _ = fmt.Fprintln(w, s.about)
	flags.VisitAll(func(f *flag.Flag) {
		name, usage := flag.UnquoteUsage(f)
		left := strings.TrimSpace("--" + f.Name + " " + name)
		if f.DefValue != "" && f.DefValue != "false" {
			usage += " (default " + f.DefValue + ")"
		}
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", left, usage)
	})
	if slices.Contains(s.settings, "OXIDE_TOKEN") {
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", "$OXIDE_TOKEN", "the rack's token")
	}
}

var claimCommand = subcommand{
	name: "claim",
	about: "oxide-csi-plugin claim gives a claim another disk: a larger one, or one that holds what " +
		"a snapshot of the claim holds. The claim keeps its name and its workload, which is stopped " +
		"meanwhile. It asks Kubernetes only, with kubectl's rights.\n\n" +
		"  oxide-csi-plugin claim grow NAMESPACE/NAME --size SIZE\n" +
		"  oxide-csi-plugin claim revert NAMESPACE/NAME --snapshot NAME\n" +
		"  oxide-csi-plugin claim grow|revert NAMESPACE/NAME --continue|--undo\n" +
		"  oxide-csi-plugin claim forget NAMESPACE/NAME    give up the earlier disk, and end it\n\n" +
		"Exit status: 0 done, 1 error. It may be killed at any time and continued.",
	operands: "the change",
}

// ParseClaimConfig parses the arguments after "claim".
func ParseClaimConfig(args []string, getenv func(string) string, help io.Writer) (claim.Options,
	error) {
	var o claim.Options
	operands, err := claimCommand.parse(&Config{}, o.Flags, args, getenv, help)
	if err != nil {
		return o, err
	}
	if err := o.Parse(operands); err != nil {
		return o, fmt.Errorf("claim: %w; see claim --help", err)
	}
	return o, nil
}

// Claim makes, continues, undoes or forgets a change of a claim.
func Claim(ctx context.Context, o claim.Options, out io.Writer) error {
	o.Kubectl = kube.Pinned(ctx)
	if err := claim.Run(ctx, o, out); err != nil {
		return fmt.Errorf("claim %s: %w", o.Verb, err)
	}
	return nil
}
