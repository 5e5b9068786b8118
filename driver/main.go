package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
)

// Main is oxide-csi-plugin: it does what the arguments and the environment say until ctx ends, and
// returns the exit status: 0, 1 for an error, or what an audit or a doctor has found.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) int {
	status, err := mainErr(ctx, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "oxide-csi-plugin:", err)
		return 1
	}
	return status
}

// subcommands are the programs beside the plugin, by their names.
var subcommands = map[string]func(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) (status int, err error){
	auditCommand.name: func(ctx context.Context, args []string, getenv func(string) string,
		stdout, stderr io.Writer) (int, error) {
		config, err := ParseAuditConfig(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		found, err := Audit(ctx, config, stdout, stderr)
		if found {
			return 2, err
		}
		return 0, err
	},
	doctorCommand.name: func(ctx context.Context, args []string, getenv func(string) string,
		stdout, _ io.Writer) (int, error) {
		config, err := ParseDoctorConfig(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		return Doctor(ctx, config, stdout)
	},
	inspectCommand.name: func(ctx context.Context, args []string, getenv func(string) string,
		stdout, _ io.Writer) (int, error) {
		config, err := ParseInspectConfig(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		return 0, Inspect(ctx, config, stdout)
	},
	readyCommand.name: func(ctx context.Context, args []string, getenv func(string) string,
		stdout, _ io.Writer) (int, error) {
		config, err := ParseReadyConfig(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		return 0, Ready(ctx, config)
	},
	prestopCommand.name: func(ctx context.Context, args []string, getenv func(string) string,
		stdout, _ io.Writer) (int, error) {
		config, err := ParsePrestopConfig(args, getenv, stdout)
		if err != nil {
			return 0, err
		}
		return 0, Prestop(ctx, config, stdout)
	},
}

func mainErr(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) (status int, err error) {
	if len(args) > 0 {
		if run, ok := subcommands[args[0]]; ok {
			return run(ctx, args[1:], getenv, stdout, stderr)
		}
	}
	config, err := ParseConfig(args, getenv, stdout)
	switch {
	case err != nil:
		return 0, err
	case config.PrintVersion:
		_, err := fmt.Fprintln(stdout, Version())
		return 0, err
	}
	return 0, Run(ctx, config, stderr)
}
