package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

var readyCommand = subcommand{
	name: "ready",
	about: "oxide-csi-plugin ready asks the plugin at CSI_ENDPOINT whether it can work. If it " +
		"cannot, it prints why:\nthe rack refuses it, the rack has not answered since it started, or " +
		"programs are missing.\nExit status: 0 ready, 1 not ready, or an error.",
	settings: []string{"CSI_ENDPOINT"},
}

// ParseReadyConfig parses the arguments after "ready" and the environment. Only Endpoint is set.
func ParseReadyConfig(args []string, getenv func(string) string, help io.Writer) (Config, error) {
	var c Config
	if _, err := readyCommand.parse(&c, func(*flag.FlagSet) {}, args, getenv, help); err != nil {
		return c, err
	}
	if c.Endpoint == "" {
		return c, errNoEndpoint
	}
	return c, nil
}

// readyTimeout is shorter than the chart's timeout of the probe, so that the reason is shown.
const readyTimeout = 4 * time.Second

// Ready returns an error that says why the plugin at an endpoint cannot work, or nil.
func Ready(ctx context.Context, c Config) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	conn, err := grpc.NewClient(c.Endpoint,
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
