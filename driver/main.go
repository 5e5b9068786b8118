package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
)

// Main is oxide-csi-plugin: it does what the arguments and the environment say until ctx ends, and
// returns the exit status: 0, 1 for an error, or 2 for an audit that has found something.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) int {
	found, err := mainErr(ctx, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "oxide-csi-plugin:", err)
		return 1
	case found:
		return 2
	}
	return 0
}

func mainErr(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) (found bool, err error) {
	if len(args) > 0 && args[0] == "audit" {
		config, err := ParseAuditConfig(args[1:], getenv, stdout)
		if err != nil {
			return false, err
		}
		return Audit(ctx, config, stdout, stderr)
	}
	config, err := ParseConfig(args, getenv, stdout)
	switch {
	case err != nil:
		return false, err
	case config.PrintVersion:
		_, err := fmt.Fprintln(stdout, Version())
		return false, err
	}
	return false, Run(ctx, config, stderr)
}
