package rack

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

var (
	must      = csitest.Must
	with      = racktest.With
	rackError = racktest.Error
	// diskOf, snapshotOf and pageOf return what a rack responds.
	diskOf, snapshotOf, pageOf = racktest.DiskOf, racktest.SnapshotOf, racktest.PageOf
)

type exchange = racktest.Exchange

func fixedToken() *Transport { return &Transport{Tokens: &TokenSource{Fixed: racktest.Token}} }

// clientFor is a client of the rack at an address.
func clientFor(t *testing.T, url string) *Client {
	t.Helper()
	return clientWith(t, Options{Host: url}, fixedToken())
}

// clientThat serves a script and returns a client for it.
func clientThat(t *testing.T, lines ...exchange) *Client {
	t.Helper()
	return clientFor(t, racktest.Serve(t, lines...))
}

func clientWith(t *testing.T, o Options, transport *Transport) *Client {
	t.Helper()
	o.Project, o.UserAgent = racktest.Project, "test"
	client, closeIdle, err := New(o, transport)
	must(t, err)
	t.Cleanup(closeIdle)
	return client
}
