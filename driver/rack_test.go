package driver

import (
	"log/slog"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
)

var must = csitest.Must

// clientFor is a client of the rack at an address.
func clientFor(t *testing.T, url string) *rack.Client {
	t.Helper()
	client, closeIdle, err := newTestClient(Config{Host: url, Token: racktest.Token,
		Project: racktest.Project})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(closeIdle)
	return client
}

// newTestClient is rack.New for a test without metrics.
func newTestClient(c Config) (*rack.Client, func(), error) {
	tokens := tokensOf(c, &hidden{}, slog.New(slog.DiscardHandler))
	return rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens})
}
