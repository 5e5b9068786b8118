package driver

import (
	"context"
	"fmt"
	"io"

	"github.com/oxidecomputer/oxide-csi-plugin/operate/claim"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

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
