package rack

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

var must = csitest.Must

// clientFor is a client of the rack at an address.
func clientFor(t *testing.T, url string) *Client {
	t.Helper()
	return clientWith(t, Options{Host: url}, &Transport{
		Tokens: &TokenSource{Fixed: racktest.Token}})
}

// clientThat serves a script and returns a client for it.
func clientThat(t *testing.T, lines ...racktest.Exchange) *Client {
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
