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

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

var readyCommand = subcommand{
	name: "ready",
	about: "oxide-csi-plugin ready asks the plugin at CSI_ENDPOINT whether it can work. If it " +
		"cannot, it prints why:\nthe rack refuses it, the rack has not answered since it started, or " +
		"programs are missing.\nExit status: 0 ready, 1 not ready, or an error.",
	settings: []string{"CSI_ENDPOINT"},
}

// readyTimeout is shorter than the chart's timeout of the probe, so that the reason is shown.
const readyTimeout = 4 * time.Second

func runReady(ctx context.Context, in invocation) (status int, err error) {
	var c Config
	if _, err := readyCommand.parse(in, &c, func(*flag.FlagSet) {}); err != nil {
		return 0, err
	}
	if c.Endpoint == "" {
		return 0, errNoEndpoint
	}
	return 0, ready(ctx, c.Endpoint)
}

// ready returns an error that says why the plugin at an endpoint cannot work, or nil.
func ready(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	conn, err := grpc.NewClient(endpoint,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("CSI_ENDPOINT (--endpoint): %w", err)
	}
	defer func() { _ = conn.Close() }()
	var trailer metadata.MD
	answer, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{},
		grpc.Trailer(&trailer))
	switch code := status.Code(err); {
	case code == codes.Unavailable:
		return errors.New("no plugin serves at CSI_ENDPOINT")
	case code == codes.DeadlineExceeded:
		return fmt.Errorf("the plugin at CSI_ENDPOINT has not answered for %s", readyTimeout)
	case err != nil:
		return errors.New(status.Convert(err).Message())
	case !answer.GetReady().GetValue():
		return errors.New("the plugin has started and waits for the first answer of the rack")
	case len(trailer.Get(waitingTrailer)) > 0:
		return errors.New(trailer.Get(waitingTrailer)[0])
	}
	return nil
}

var prestopCommand = subcommand{
	name: "prestop",
	about: "oxide-csi-plugin prestop keeps the node's driver while its node goes: as a preStop " +
		"hook, it waits until the\nprogram at OXIDE_LEAVE_SOCKET (oxide-node-keeper leave) closes the " +
		"connection, because the node's volumes are\ndetached or because the node stays. If nobody " +
		"serves there, it ends at once.\nExit status: 0, or 1 for an error or if --timeout has passed.",
	settings: []string{"OXIDE_LEAVE_SOCKET"},
}

func runPrestop(ctx context.Context, in invocation) (status int, err error) {
	var c Config
	timeout := 2 * time.Minute
	_, err = prestopCommand.parse(in, &c, func(flags *flag.FlagSet) {
		flags.DurationVar(&timeout, "timeout", timeout, "the longest `duration` to wait")
	})
	switch {
	case err != nil:
		return 0, err
	case c.LeaveSocket == "":
		return 0, errors.New("OXIDE_LEAVE_SOCKET (--leave-socket) is not set: it has to be an absolute " +
			"path")
	case timeout <= 0:
		return 0, errors.New("--timeout has to be positive")
	}
	return 0, awaitClose(ctx, c.LeaveSocket, timeout, in.stdout)
}

// awaitClose waits until the program at the socket closes the connection. A program that is not
// there is no reason to wait: the driver ends, as it would without the hook.
func awaitClose(ctx context.Context, socket string, timeout time.Duration, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err == nil {
		defer func() { _ = conn.Close() }()
		log := slog.New(slog.NewTextHandler(out, nil))
		defer async.AfterDone(ctx, log, "closing the connection", func() { _ = conn.Close() })()
		_, err = io.Copy(io.Discard, conn)
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("the program at OXIDE_LEAVE_SOCKET has not closed the connection within %s; "+
			"see its log, and the VolumeAttachments of this node", timeout)
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		_, err = fmt.Fprintln(out, "no program serves at OXIDE_LEAVE_SOCKET, so the driver ends now:",
			err)
	}
	return err
}
