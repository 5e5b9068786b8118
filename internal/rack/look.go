package rack

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"net/http/httptrace"
	"path"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// DefaultLookLimit is the age after which a read of the rack is too old for the change that depends
// on it. It is shorter than the leader's lease (deploy/chart). So a former leader sends no change
// once the next leader answers calls.
const DefaultLookLimit = 5 * time.Second

// Look is the time right before a read of the rack. Its clock also runs while the process is
// stopped or the machine is suspended.
type Look time.Duration

// Looking returns the current time as a Look.
func Looking() Look { return Look(sinceBoot()) }

// attempt is one request for a change. The Transport gets the attempt from the request's context.
type attempt struct {
	look  Look
	limit time.Duration
	// sent is set when the request gets a connection. From then on it may reach the rack.
	sent atomic.Bool
	// late is set if the look became too old before the request got a connection.
	late atomic.Bool
}

type attemptKey struct{}

var errLookOld = errors.New("the look at the rack is too old")

// Request calls do(), which requests a change. The Transport sends that request only if the look is
// recent enough. The result "open" is true if the outcome is unknown: the rack has neither refused
// nor confirmed the change. If the rack has refused it, err is the SDK's error. do() must also
// return an error if the response describes another object.
func (c *Client) Request(ctx context.Context, doing string, look Look,
	do func(context.Context) error) (open bool, err error) {
	a := &attempt{look: look, limit: cmp.Or(c.LookLimit, DefaultLookLimit)}
	err = do(context.WithValue(ctx, attemptKey{}, a))
	switch {
	case err == nil, Definite(err):
		return false, err
	case a.late.Load() && !a.sent.Load():
		return false, csierr.New(csierr.LookTooOld, "%s: more than %s have passed since the driver "+
			"looked at the rack, and the state may have changed; nothing was done: repeat the "+
			"call", doing, a.limit)
	}
	return a.sent.Load(), Error(ctx, doing, err)
}

// left returns how long the change may still be sent. It compares the caller's deadline with the
// wall clock, because timers stop while the machine is suspended.
func (a *attempt) left(caller context.Context) time.Duration {
	left := a.limit - time.Duration(Looking()-a.look)
	if deadline, limited := caller.Deadline(); limited {
		left = min(left, deadline.Round(0).Sub(time.Now().Round(0)))
	}
	return left
}

// begin returns the context for the request, or an error if the look is too old. The context ends
// with ctx, or when the look gets too old before the request has a connection.
func (a *attempt) begin(ctx, caller context.Context) (context.Context, error) {
	left := a.left(caller)
	if left <= 0 {
		a.late.Store(true)
		return nil, errLookOld
	}
	ctx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(left, func() {
		a.late.Store(true)
		cancel()
	})
	trace := &httptrace.ClientTrace{GotConn: func(g httptrace.GotConnInfo) {
		timer.Stop()
		// Check again: net/http may repeat a request, and timers stop while the machine is suspended.
		if a.left(caller) > 0 {
			a.sent.Store(true)
			return
		}
		a.late.Store(true)
		cancel()
		if c, ok := g.Conn.(*tls.Conn); !ok || c.ConnectionState().NegotiatedProtocol != "h2" {
			_ = g.Conn.Close() // HTTP/1 may write before it notices that the context ended
		}
	}}
	return httptrace.WithClientTrace(ctx, trace), nil
}

var operations = []struct{ method, path, operation string }{
	{http.MethodGet, "/v1/disks", "disk_list"},
	{http.MethodPost, "/v1/disks", "disk_create"},
	{http.MethodGet, "/v1/disks/*", "disk_view"},
	{http.MethodDelete, "/v1/disks/*", "disk_delete"},
	{http.MethodGet, "/v1/instances", "instance_list"},
	{http.MethodGet, "/v1/instances/*", "instance_view"},
	{http.MethodGet, "/v1/instances/*/disks", "instance_disk_list"},
	{http.MethodPost, "/v1/instances/*/disks/attach", "instance_disk_attach"},
	{http.MethodPost, "/v1/instances/*/disks/detach", "instance_disk_detach"},
	{http.MethodGet, "/v1/snapshots", "snapshot_list"},
	{http.MethodPost, "/v1/snapshots", "snapshot_create"},
	{http.MethodGet, "/v1/snapshots/*", "snapshot_view"},
	{http.MethodDelete, "/v1/snapshots/*", "snapshot_delete"},
	{http.MethodGet, "/v1/projects/*", "project_view"},
	{http.MethodGet, "/v1/images/*", "image_view"},
	{http.MethodGet, "/v1/utilization", "utilization_view"},
	{http.MethodGet, "/v1/me", "current_user_view"},
	{http.MethodGet, "/v1/me/access-tokens", "current_user_access_token_list"},
}

// Operation returns a request's operation id, or "other".
func Operation(r *http.Request) string {
	for _, o := range operations {
		if matches, _ := path.Match(o.path, r.URL.Path); matches && r.Method == o.method {
			return o.operation
		}
	}
	return "other"
}
