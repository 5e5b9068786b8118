package driver

import (
	"log/slog"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// rackThat serves a script and gives a controller for it.
func rackThat(t *testing.T, lines ...racktest.Exchange) *Controller {
	t.Helper()
	return controllerFor(t, racktest.Serve(t, lines...))
}

func controllerFor(t *testing.T, url string) *Controller {
	t.Helper()
	client, closeIdle, err := newTestClient(Config{Host: url, Token: racktest.Token,
		Project: racktest.Project}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(closeIdle)
	return &Controller{
		Rack: client, ClusterID: "blue",
		Log: slog.New(slog.DiscardHandler),
	}
}

// newTestClient is rack.New for a test that looks neither at metrics nor at what is hidden.
func newTestClient(c Config, refused func()) (*rack.Client, func(), error) {
	tokens := tokensOf(c, &hidden{}, slog.New(slog.DiscardHandler))
	return rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens, Refused: refused})
}

func grpcCode(err error) codes.Code { return status.Code(err) }

// rackA is the topology of a driver that was started with rack=a.
var rackA = []volume.Segments{{volume.TopologyPrefix + "rack": "a"}}
