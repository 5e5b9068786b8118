package rack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
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
	_, err := c.DiskView(ctx, oxide.DiskViewParams{Disk: racktest.Disk})
	return Error(ctx, "read disk", err)
}

func TestEveryResponseOfTheRackHasItsCode(t *testing.T) { // OX-13
	for _, test := range []struct {
		name   string
		answer exchange
		code   codes.Code
		reason csierr.Reason
		words  string // that the message has to contain
	}{
		{"a name that is taken is 400 (OX-1)", rackError(400, "ObjectAlreadyExists",
			`already exists: disk "x"`), codes.AlreadyExists, csierr.NameTaken,
			`already exists: disk "x"`},
		{"a bad value (OX-2)", rackError(400, "InvalidValue", "unsupported value"), codes.OutOfRange,
			csierr.ValueRefused, "unsupported value"},
		{"another refusal", rackError(400, "InvalidRequest", "no"),
			codes.Internal, csierr.RackError, "no (HTTP 400, request r-1)"},
		{"a body that the rack cannot parse", rackError(400, "", "unable to parse JSON body"),
			codes.Unavailable, csierr.RackUnavailable, "unable to parse"},
		{"a bad token (OX-4)", rackError(401, "Unauthorized", "credentials missing or invalid"),
			codes.Unauthenticated, csierr.TokenRejected, "OXIDE_TOKEN"},
		{"a missing role (OX-5)", rackError(403, "Forbidden", "Forbidden"), codes.PermissionDenied,
			csierr.RoleMissing, "limited-collaborator"},
		{"an unknown object (OX-6)", rackError(404, "ObjectNotFound", "not found: disk"),
			codes.NotFound, csierr.ObjectNotFound, "not found: disk"},
		{"a 404 that is not the rack's (OX-6)", exchange{Status: 404,
			Body: "<html>Not Found</html>"}, codes.Unavailable, csierr.RackUnknown, "OXIDE_HOST"},
		{"a route the rack does not have (OX-6)", rackError(404, "", "Not Found"), codes.Unavailable,
			csierr.RackUnknown, "v20"},
		{"a conflict (OX-7)", rackError(409, "Conflict", "boot disk cannot be detached"),
			codes.FailedPrecondition, csierr.Conflict, "boot disk"},
		{"an object that is gone (OX-8)", rackError(410, "Gone", "Gone"), codes.Internal,
			csierr.RackError, "request r-1"},
		{"an error inside the rack (OX-8)", rackError(500, "Internal", "Internal Server Error"),
			codes.Unavailable, csierr.RackUnavailable, "request r-1"},
		{"the rack cannot answer now (OX-9)", rackError(503, "ServiceNotAvailable",
			"Service Unavailable"), codes.Unavailable, csierr.RackUnavailable, "Service Unavailable"},
		{"a rack that limits requests (OX-9)", racktest.Error(429, "TooManyRequests", "slow down"),
			codes.Unavailable, csierr.RackUnavailable, "slow down"},
		{"a proxy that could not read the rack's response (OX-8)", exchange{Status: 520, Body: "<html>"},
			codes.Unavailable, csierr.RackUnavailable, "HTTP 520"},
		{"no room (OX-10)", rackError(507, "InsufficientCapacity", "Insufficient capacity: quota"),
			codes.ResourceExhausted, csierr.RackFull, "quota"},
		{"an unexpected status (OX-12)", exchange{Status: 418, Body: "short and stout"},
			codes.Unavailable, csierr.RackUnavailable, "HTTP 418"},
		{"a success that is no JSON", exchange{Status: 200, Body: "<html>hello</html>"},
			codes.Unavailable, csierr.RackUnavailable, "incomplete response"},
		{"a connection cut before the answer (OX-9)", exchange{Cut: true}, codes.Unavailable,
			csierr.RackUnavailable, "incomplete response"},
		{"a token in the rack's text is not shown (B-16)", rackError(500, "Internal",
			"Bearer "+racktest.Token+"\nline two"), codes.Unavailable, csierr.RackUnavailable,
			"Bearer *** line two"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := viewing(t.Context(), clientThat(t, test.answer.To(racktest.ViewDisk)))
			csitest.Want(t, err, test.code, test.reason)
			message := csierr.Message(err)
			if !strings.Contains(message, test.words) || !strings.Contains(message, "read disk") {
				t.Errorf("the message %q lacks %q or what was done", message, test.words)
			}
			for _, leak := range []string{"127.0.0.1", "content-type", "authorization", "/v1/"} {
				if strings.Contains(strings.ToLower(message), leak) {
					t.Errorf("the message %q shows %q", message, leak)
				}
			}
		})
	}
}

func TestAnUnreachableRackIsUnavailable(t *testing.T) { // OX-9
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	open, err := create(t.Context(), clientFor(t, server.URL), Looking())
	csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
	refused := "connect to " + strings.TrimPrefix(server.URL, "http://") +
		": connect: connection refused"
	if text := err.Error(); open || !strings.HasSuffix(text, refused) ||
		strings.Contains(text, "/v1/") {
		t.Errorf("%v should end with %q, without the URL; open is %t", err, refused, open)
	}
}

// The errors of a proxy that refuses and of a proxy that does not listen name the proxy, without
// its password, and the variable.
func TestAnErrorNamesTheProxyAndItsVariable(t *testing.T) { // OX-9
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusProxyAuthRequired)
	}))
	t.Cleanup(proxy.Close)
	dead := httptest.NewServer(http.NotFoundHandler())
	dead.Close()
	for _, c := range []struct{ host, variable, proxy, why string }{
		{"https://rack.invalid", "HTTPS_PROXY", proxy.URL, "Proxy Authentication Required"},
		{"https://rack.invalid", "https_proxy", dead.URL, "connect: connection refused"},
		{"http://rack.invalid", "HTTP_PROXY", dead.URL, "connect: connection refused"},
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
		csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
		want := "through the proxy " + strings.TrimPrefix(c.proxy, "http://") + " in " + c.variable
		for _, words := range []string{want, c.why, "NO_PROXY"} {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("%v lacks %q", err, words)
			}
		}
		if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "user") {
			t.Errorf("%v shows the proxy's password", err)
		}
	}
}

func TestTheCallersDeadlineLimitsEveryRequest(t *testing.T) { // OX-11
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	csitest.Want(t, viewing(ctx, clientFor(t, racktest.Silent(t))), codes.DeadlineExceeded,
		csierr.DeadlineExceeded)

	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(30*time.Millisecond, cancel)
	csitest.Want(t, viewing(ctx, clientFor(t, racktest.Silent(t))), codes.Canceled, csierr.Canceled)
}

func TestACallThatEndsAtItsDeadlineIsDeadlineExceeded(t *testing.T) { // OX-11
	// gRPC cancels a call at its deadline, sometimes before the context's own timer fires.
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

// Any server between driver and rack may answer with any status, before or after the effect.
func TestOnlyARefusalOfTheRackIsDefinite(t *testing.T) { // OX-8
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

// The client accepts any 2xx to a DELETE, and any disk to an attach.
func TestOnlyASuccessOfTheRackIsASuccess(t *testing.T) { // OX-8
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

func TestAChangeIsNotSentAfterAnOldLook(t *testing.T) {
	c := clientThat(t) // which expects no request
	open, err := create(t.Context(), c, Looking()-Look(DefaultLookLimit))
	csitest.Want(t, err, codes.Aborted, csierr.LookTooOld)
	if open {
		t.Error("it is open")
	}
	// The limit includes the time that a connection takes.
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
	csitest.Want(t, err, codes.Aborted, csierr.LookTooOld)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestOnlyTheRacksRefusalOfTheTokenIsRetried(t *testing.T) {
	for proxy, want := range map[bool]int32{false: 2, true: 1} {
		var requests atomic.Int32
		path := filepath.Join(t.TempDir(), "token")
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeToken(t, path, fmt.Sprint("token-", requests.Add(1)))
			if !proxy {
				w.Header().Set("X-Request-Id", "r-1")
			}
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(rackError(401, "Unauthorized", "no").Body))
		}))
		t.Cleanup(server.Close)
		writeToken(t, path, "token-0")
		c := clientWith(t, Options{Host: server.URL}, &Transport{Tokens: tokenFile(path)})
		_, _ = create(t.Context(), c, Looking())
		if got := requests.Load(); got != want {
			t.Errorf("of a proxy %t: %d requests, want %d", proxy, got, want)
		}
	}
}

func TestAnErrorBodyIsReadUpToALimit(t *testing.T) {
	var sent atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
		for range 30 {
			n, err := w.Write([]byte(strings.Repeat("<", 1<<20)))
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}))
	_, err := create(t.Context(), clientFor(t, server.URL), Looking())
	server.Close()
	csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
	var answer *oxide.HTTPError
	if errors.As(err, &answer) || len(err.Error()) > 1<<10 || sent.Load() > 16<<20 {
		t.Errorf("%d bytes were read, and the error has %d", sent.Load(), len(err.Error()))
	}
}

func TestACAFileIsReadAgain(t *testing.T) { // D-63
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		_, _ = w.Write([]byte(diskOf("detached")))
	}))
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "ca.pem")
	writeToken(t, path, string(racktest.PEM(selfSigned(t))))
	c := clientWith(t, Options{Host: server.URL, CAFile: path}, fixedToken())
	csitest.Want(t, viewing(t.Context(), c), codes.Unavailable, csierr.RackUnavailable)
	writeToken(t, path, string(racktest.PEM(server.Certificate().Raw)))
	_, err := c.DiskView(t.Context(), oxide.DiskViewParams{Disk: racktest.Disk})
	must(t, err)
}

// selfSigned returns a certificate that no server has.
func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1),
		IsCA: true}, &x509.Certificate{SerialNumber: big.NewInt(1)}, &key.PublicKey, key)
	must(t, err)
	return der
}
