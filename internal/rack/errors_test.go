package rack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func viewing(ctx context.Context, c *Client) error {
	return Error(ctx, "read disk", csitest.Err(c.DiskView(ctx,
		oxide.DiskViewParams{Disk: racktest.Disk})))
}

func TestFailedRequestsAreMappedToReasons(t *testing.T) { // OX-13
	for _, test := range []struct {
		name   string
		answer exchange
		ends   func(*testing.T, error)
	}{
		{"a name that is taken is 400 (OX-1)", rackError(400, "ObjectAlreadyExists",
			`already exists: disk "x"`), fails(csierr.NameTaken, `already exists: disk "x"`)},
		{"a bad value (OX-2)", rackError(400, "InvalidValue", "unsupported value"),
			fails(csierr.ValueRefused, "unsupported value")},
		{"another refusal", rackError(400, "InvalidRequest", "no"), fails(csierr.RackError,
			"no (HTTP 400, request r-1)")},
		{"a body that the rack cannot parse", rackError(400, "", "unable to parse JSON body"),
			fails(csierr.RackUnavailable, "unable to parse")},
		{"a bad token (OX-4)", rackError(401, "Unauthorized", "credentials missing or invalid"),
			fails(csierr.TokenRejected, "OXIDE_TOKEN")},
		{"a missing role (OX-5)", rackError(403, "Forbidden", "Forbidden"), fails(csierr.RoleMissing,
			"limited-collaborator")},
		{"an unknown object (OX-6)", rackError(404, "ObjectNotFound", "not found: disk"),
			fails(csierr.ObjectNotFound, "not found: disk")},
		{"a 404 that is not the rack's (OX-6)", exchange{Status: 404,
			Body: "<html>Not Found</html>"}, fails(csierr.RackUnknown, "OXIDE_HOST")},
		{"a route the rack does not have (OX-6)", rackError(404, "", "Not Found"),
			fails(csierr.RackUnknown, "v20")},
		{"a conflict (OX-7)", rackError(409, "Conflict", "boot disk cannot be detached"),
			fails(csierr.Conflict, "boot disk")},
		{"an object that is gone (OX-8)", rackError(410, "Gone", "Gone"), fails(csierr.RackError,
			"request r-1")},
		{"an error inside the rack (OX-8)", rackError(500, "Internal", "Internal Server Error"),
			fails(csierr.RackUnavailable, "request r-1")},
		{"the rack cannot answer now (OX-9)", rackError(503, "ServiceNotAvailable",
			"Service Unavailable"), fails(csierr.RackUnavailable, "Service Unavailable")},
		{"a rack that limits requests (OX-9)", racktest.Error(429, "TooManyRequests", "slow down"),
			fails(csierr.RackUnavailable, "slow down")},
		{"a proxy that could not read the rack's response (OX-8)", exchange{Status: 520, Body: "<html>"},
			fails(csierr.RackUnavailable, "HTTP 520")},
		{"no room (OX-10)", rackError(507, "InsufficientCapacity", "Insufficient capacity: quota"),
			fails(csierr.RackFull, "quota")},
		{"an unexpected status (OX-12)", exchange{Status: 418, Body: "short and stout"},
			fails(csierr.RackUnavailable, "HTTP 418")},
		{"a success that is no JSON", exchange{Status: 200, Body: "<html>hello</html>"},
			fails(csierr.RackUnavailable, "incomplete response")},
		{"a connection cut before the answer (OX-9)", exchange{Cut: true}, fails(csierr.RackUnavailable,
			"incomplete response")},
		{"a token in the rack's text is not shown (B-16)", rackError(500, "Internal",
			"Bearer "+racktest.Token+"\nline two"), fails(csierr.RackUnavailable, "Bearer *** line two")},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := viewing(t.Context(), clientThat(t, test.answer.To(racktest.ViewDisk)))
			test.ends(t, err)
			message := strings.ToLower(csierr.Message(err))
			if !strings.Contains(message, "read disk") {
				t.Errorf("the message %q lacks what was done", message)
			}
			for _, leak := range []string{"127.0.0.1", "content-type", "authorization", "/v1/"} {
				if strings.Contains(message, leak) {
					t.Errorf("the message %q shows %q", message, leak)
				}
			}
		})
	}
}

func TestTheErrorForAnUnreachableRackNamesItsAddress(t *testing.T) { // OX-9
	url := racktest.Dead()
	open, err := create(t.Context(), clientFor(t, url), Looking())
	fails(csierr.RackUnavailable)(t, err)
	refused := "connect to " + strings.TrimPrefix(url, "http://") + ": connect: connection refused"
	if text := err.Error(); open || !strings.HasSuffix(text, refused) || strings.Contains(text,
		"/v1/") {
		t.Errorf("%v should end with %q, without the URL; open is %t", err, refused, open)
	}
}

func TestProxyErrorsNameTheProxyAndItsEnvironmentVariable(t *testing.T) { // OX-9
	proxy := racktest.At(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusProxyAuthRequired)
	})
	dead := racktest.Dead()
	for _, c := range []struct{ host, variable, proxy, why string }{
		{"https://rack.invalid", "HTTPS_PROXY", proxy, "Proxy Authentication Required"},
		{"https://rack.invalid", "https_proxy", dead, "connect: connection refused"},
		{"http://rack.invalid", "HTTP_PROXY", dead, "connect: connection refused"},
	} {
		for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
			t.Setenv(name, "")
		}
		t.Setenv(c.variable, strings.Replace(c.proxy, "//", "//user:secret@", 1))
		transport := fixedToken()
		client := clientWith(t, Options{Host: c.host}, transport)
		transport.Base.(*http.Transport).Proxy = func(*http.Request) (*url.URL, error) {
			return url.Parse(os.Getenv(c.variable)) // net/http reads the environment once
		}
		err := viewing(t.Context(), client)
		fails(csierr.RackUnavailable, "through the proxy "+strings.TrimPrefix(c.proxy, "http://")+" in "+
			c.variable, c.why, "NO_PROXY")(t, err)
		if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "user") {
			t.Errorf("%v shows the proxy's password", err)
		}
	}
}

func TestRequestsEndAtTheCallersDeadlineOrCancellation(t *testing.T) { // OX-11
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	fails(csierr.DeadlineExceeded)(t, viewing(ctx, clientFor(t, racktest.Silent(t))))

	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(30*time.Millisecond, cancel)
	fails(csierr.Canceled)(t, viewing(ctx, clientFor(t, racktest.Silent(t))))
}

func TestCancellationNearTheDeadlineIsDeadlineExceeded(t *testing.T) { // OX-11
	for left, want := range map[time.Duration]codes.Code{
		0: codes.DeadlineExceeded, time.Millisecond: codes.DeadlineExceeded,
		time.Hour: codes.Canceled,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), left)
		cancel()
		if got := status.Code(transportError(ctx, "read disk", context.Canceled)); got != want {
			t.Errorf("canceled %s before the deadline: got %s, want %s", left, got, want)
		}
	}
}

const postDisk = "POST /v1/disks"

func create(ctx context.Context, c *Client, look Look) (open bool, err error) {
	return c.Request(ctx, "create disk", look, func(ctx context.Context) error {
		_, err := c.DiskCreate(ctx, oxide.DiskCreateParams{Project: racktest.Project,
			Body: &oxide.DiskCreate{Name: oxide.Name(volume.DiskName("blue", "pvc-1")),
				DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}}})
		return err
	})
}

// A server between driver and rack may send any status, whether or not the rack makes the change.
func TestAChangesEffectIsUnknownUnlessTheRackConfirmsOrRefusesIt(t *testing.T) { // OX-8
	refusal := func(status int) exchange {
		return rackError(status, "InvalidRequest", "no").To(postDisk)
	}
	type answer struct {
		name string
		exchange
		open bool
	}
	answers := []answer{
		{"the rack's refusal", refusal(400), false}, {"the rack's conflict", refusal(409), false},
		{"no room", refusal(507), false}, {"an error inside the rack", refusal(500), true},
		{"the rack's timeout", refusal(408), true},
		{"a refusal without an error code", rackError(400, "", "no").To(postDisk), true},
		{"a refusal that ends early", exchange{Want: postDisk, Status: 400,
			Body: `{"request_id":"r-1","error_code":"Inv`}, true},
		{"a disk", exchange{Want: postDisk, Status: 201, Body: diskOf("creating")}, false},
		{"a disk that another server sends", exchange{Want: postDisk, Status: 201, Proxy: true,
			Body: diskOf("creating")}, true},
		{"a lost answer", exchange{Want: postDisk, Cut: true}, true},
	}
	for status := 200; status < 600; status++ {
		for _, body := range []string{"<html>", "{}", "null", refusal(400).Body,
			`{"error_code":"InvalidRequest","message":"no"}`} {
			e := exchange{Want: postDisk, Status: status, Body: body, Proxy: true}
			if status%100 < 12 || status == 499 {
				answers = append(answers, answer{fmt.Sprint("a proxy's ", status, " ", body), e, true})
			}
		}
	}
	for _, test := range answers {
		t.Run(test.name, func(t *testing.T) {
			open, err := create(t.Context(), clientThat(t, test.exchange), Looking())
			switch {
			case open != test.open:
				t.Errorf("open is %t after %v", open, err)
			case open && !csierr.Retryable(err):
				t.Errorf("the CO does not repeat the call after %v", err)
			case !open && err != nil && !Definite(err):
				t.Errorf("%v is not the rack's", err)
			}
		})
	}
}

// The SDK accepts any 2xx as the answer to a DELETE, and any disk as the answer to an attach.
func TestOnlyTheRacksExpectedResponseConfirmsAChange(t *testing.T) { // OX-8
	const attach = "POST /v1/instances/" + racktest.Instance + "/disks/attach"
	do := map[string]func(context.Context, *Client) error{
		racktest.DeleteDisk: func(ctx context.Context, c *Client) error {
			return c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: racktest.Disk})
		},
		attach: func(ctx context.Context, c *Client) error {
			_, err := c.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
				Instance: racktest.Instance, Body: &oxide.DiskPath{Disk: racktest.Disk}})
			return err
		},
	}
	attached := diskOf("attached " + racktest.Instance)
	for _, test := range []struct {
		exchange
		open bool
	}{
		{exchange{Want: racktest.DeleteDisk, Status: 204}, false},
		{exchange{Want: racktest.DeleteDisk, Status: 204, Proxy: true}, true},
		{exchange{Want: racktest.DeleteDisk, Status: 200}, true},
		{exchange{Want: racktest.DeleteDisk, Status: 200, Proxy: true}, true},
		{exchange{Want: attach, Status: 202, Body: attached}, false},
		{exchange{Want: attach, Status: 202, Body: attached, Proxy: true}, true},
	} {
		c := clientThat(t, test.exchange)
		open, err := c.Request(t.Context(), "change", Looking(), func(ctx context.Context) error {
			return do[test.Want](ctx, c)
		})
		if open != test.open || open != csierr.Retryable(err) {
			t.Errorf("%d to %s, of a proxy %t: open is %t after %v", test.Status, test.Want, test.Proxy,
				open, err)
		}
	}
}

func TestRequestSendsNoChangeIfTheRackWasReadTooLongAgo(t *testing.T) {
	c := clientThat(t) // the scripted rack expects no request
	open, err := create(t.Context(), c, Looking()-Look(DefaultLookLimit))
	fails(csierr.LookTooOld)(t, err)
	if open {
		t.Error("it is open")
	}
	// LookLimit also covers the time until the client has a connection.
	slow := make(chan struct{})
	dialing := fixedToken()
	c = clientWith(t, Options{Host: "http://rack.invalid"}, dialing)
	dialing.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
		defer close(slow)
		<-r.Context().Done()
		return nil, r.Context().Err()
	})
	c.LookLimit = 50 * time.Millisecond
	_, err = create(t.Context(), c, Looking())
	<-slow
	fails(csierr.LookTooOld)(t, err)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestClientReadsAChangedCAFile(t *testing.T) { // D-63
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		_, _ = w.Write([]byte(diskOf("detached")))
	}))
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "ca.pem")
	writeToken(t, path, string(racktest.PEM(selfSigned(t))))
	c := clientWith(t, Options{Host: server.URL, CAFile: path}, fixedToken())
	fails(csierr.RackUnavailable)(t, viewing(t.Context(), c))
	writeToken(t, path, string(racktest.PEM(server.Certificate().Raw)))
	csitest.Got(c.DiskView(t.Context(), oxide.DiskViewParams{Disk: racktest.Disk}))(t)
}

func selfSigned(t *testing.T) []byte {
	t.Helper()
	key := csitest.Got(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	der := csitest.Got(x509.CreateCertificate(rand.Reader,
		&x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true},
		&x509.Certificate{SerialNumber: big.NewInt(1)}, &key.PublicKey, key))(t)
	return der
}
