package keeper

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
)

// Release is set in release builds: -ldflags "-X …/keeper.Release=v1.2.3".
var Release = ""

// Main is oxide-node-keeper: it does what the arguments and the environment say until ctx ends, and
// returns the exit status.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) int {
	err := mainErr(ctx, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v\n", component, err)
		return 1
	}
	return 0
}

func mainErr(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) error {
	s, err := ParseSettings(args, getenv, stdout)
	if err != nil {
		return err
	}
	if s.Version {
		_, err := fmt.Fprintln(stdout, cmp.Or(Release, "devel"))
		return err
	}
	var handler slog.Handler = slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel})
	if s.LogJSON {
		handler = slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel})
	}
	return Run(ctx, s, slog.New(handler))
}
