package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// PrestopConfig is the configuration of a wait, which ParsePrestopConfig fills. Of Config it uses
// only LeaveSocket.
type PrestopConfig struct {
	Config
	Timeout time.Duration
}

var prestopCommand = subcommand{
	name: "prestop",
	about: "oxide-csi-plugin prestop keeps the node's driver while its node goes: as a preStop " +
		"hook, it waits until the\nprogram at OXIDE_LEAVE_SOCKET (oxide-node-keeper leave) closes the " +
		"connection, because the node's volumes are\ndetached or because the node stays. If nobody " +
		"serves there, it ends at once.\nExit status: 0, or 1 for an error or if --timeout has passed.",
	settings: []string{"OXIDE_LEAVE_SOCKET"},
}

// ParsePrestopConfig parses the arguments after "prestop" and the environment.
func ParsePrestopConfig(args []string, getenv func(string) string, help io.Writer) (PrestopConfig,
	error) {
	c := PrestopConfig{Timeout: 2 * time.Minute}
	_, err := prestopCommand.parse(&c.Config, func(flags *flag.FlagSet) {
		flags.DurationVar(&c.Timeout, "timeout", c.Timeout, "the longest `duration` to wait")
	}, args, getenv, help)
	switch {
	case err != nil:
		return c, err
	case c.LeaveSocket == "":
		return c, errors.New("OXIDE_LEAVE_SOCKET (--leave-socket) is not set: it has to be an absolute " +
			"path")
	case c.Timeout <= 0:
		return c, errors.New("--timeout has to be positive")
	}
	return c, nil
}

// Prestop waits until the program at the socket closes the connection. A program that is not there
// is no reason to wait: the driver ends, as it would without the hook.
func Prestop(ctx context.Context, c PrestopConfig, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.LeaveSocket)
	if err == nil {
		defer func() { _ = conn.Close() }()
		log := slog.New(slog.NewTextHandler(out, nil))
		defer async.AfterDone(ctx, log, "closing the connection", func() { _ = conn.Close() })()
		_, err = io.Copy(io.Discard, conn)
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("the program at OXIDE_LEAVE_SOCKET has not closed the connection within %s; "+
			"see its log, and the VolumeAttachments of this node", c.Timeout)
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		_, err = fmt.Fprintln(out, "no program serves at OXIDE_LEAVE_SOCKET, so the driver ends now:",
			err)
	}
	return err
}
