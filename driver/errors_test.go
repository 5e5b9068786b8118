package driver

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide.go/oxide"
)

const viewDisk = "GET /v1/disks/" + testDisk

// viewing reads the disk, as the simplest call that can meet an answer.
func viewing(ctx context.Context, c *Controller) error {
	_, err := c.Client.DiskView(ctx, oxide.DiskViewParams{Disk: testDisk})
	return statusError(ctx, "read disk", err)
}

func TestEveryAnswerOfTheRackHasItsCode(t *testing.T) {
	for _, test := range []struct {
		name   string
		answer exchange
		code   codes.Code
		reason Reason
		words  string // that the message has to contain
	}{
		{"OX-1 a name that is taken is 400", rackError(400, "ObjectAlreadyExists",
			`already exists: disk "x"`), codes.AlreadyExists, ReasonNameTaken,
			`already exists: disk "x"`},
		{"OX-2 a bad value", rackError(400, "InvalidValue", "unsupported value"), codes.OutOfRange,
			ReasonValueRefused, "unsupported value"},
		{"a refusal nobody has a better word for", rackError(400, "InvalidRequest", "no"),
			codes.Internal, ReasonRackError, "no (HTTP 400, request r-1)"},
		{"a body that the rack cannot parse", rackError(400, "", "unable to parse JSON body"),
			codes.Internal, ReasonRackError, "unable to parse"},
		{"OX-4 a bad token", rackError(401, "Unauthorized", "credentials missing or invalid"),
			codes.Unauthenticated, ReasonTokenRejected, "OXIDE_TOKEN"},
		{"OX-5 a missing role", rackError(403, "Forbidden", "Forbidden"), codes.PermissionDenied,
			ReasonRoleMissing, "limited-collaborator"},
		{"OX-6 an unknown object", rackError(404, "ObjectNotFound", "not found: disk"),
			codes.NotFound,
			ReasonObjectNotFound, "not found: disk"},
		{"OX-6 a 404 that is not the rack's", exchange{status: 404, body: "<html>Not Found</html>"},
			codes.Internal, ReasonRackUnknown, "OXIDE_HOST"},
		{"OX-6 a route the rack does not have", rackError(404, "", "Not Found"), codes.Internal,
			ReasonRackUnknown, "v20"},
		{"OX-7 a conflict", rackError(409, "Conflict", "boot disk cannot be detached"),
			codes.FailedPrecondition, ReasonConflict, "boot disk"},
		{"OX-8 gone", rackError(410, "Gone", "Gone"), codes.Internal, ReasonRackError,
			"request r-1"},
		{"OX-8 an error inside the rack", rackError(500, "Internal", "Internal Server Error"),
			codes.Unavailable, ReasonRackUnavailable, "request r-1"},
		{"OX-8 a proxy's time is up", exchange{status: 408, body: "<html>timeout</html>"},
			codes.Unavailable, ReasonRackUnavailable, "HTTP 408"},
		{"OX-8 a proxy that did not understand the rack", exchange{status: 520, body: "<html>"},
			codes.Unavailable, ReasonRackUnavailable, "HTTP 520"},
		{"OX-8 a call that does not exist there", exchange{status: 501, body: "<html>"},
			codes.Internal, ReasonRackError, "HTTP 501"},
		{"OX-9 the rack cannot answer now", rackError(503, "ServiceNotAvailable",
			"Service Unavailable"),
			codes.Unavailable, ReasonRackUnavailable, "Service Unavailable"},
		{"OX-9 a proxy that limits", exchange{status: 429, body: "slow down"}, codes.Unavailable,
			ReasonRackUnavailable, "HTTP 429"},
		{"OX-9 a proxy without a rack", exchange{status: 502, body: "<html>Bad Gateway</html>"},
			codes.Unavailable, ReasonRackUnavailable, "HTTP 502"},
		{"OX-10 no room", rackError(507, "InsufficientCapacity", "Insufficient capacity: quota"),
			codes.ResourceExhausted, ReasonRackFull, "quota"},
		{"OX-12 a redirect is not followed", exchange{status: 302, body: ""}, codes.Internal,
			ReasonRackError, "HTTP 302"},
		{"OX-12 a status nobody expects", exchange{status: 418, body: "short and stout"},
			codes.Internal,
			ReasonRackError, "HTTP 418"},
		{"a success that is no JSON", exchange{status: 200, body: "<html>hello</html>"},
			codes.Unavailable, ReasonRackUnavailable, "no whole answer"},
		{"OX-9 a connection cut before the answer", exchange{cut: true}, codes.Unavailable,
			ReasonRackUnavailable, "no whole answer"},
		{"B-16 a token in the rack's text is not shown", rackError(500, "Internal",
			"Bearer "+testToken+"\nline two"), codes.Unavailable, ReasonRackUnavailable,
			"Bearer *** line two"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := viewing(t.Context(), rackThat(t, test.answer.to(viewDisk)))
			wantFailure(t, err, test.code, test.reason)
			message := status.Convert(err).Message()
			if !strings.Contains(message, test.words) || !strings.Contains(message, "read disk") {
				t.Errorf("the message %q lacks %q or what was done", message, test.words)
			}
		})
	}
}

func TestOX9AnUnreachableRackIsUnavailable(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	err := viewing(t.Context(), controllerFor(t, server.URL))
	wantFailure(t, err, codes.Unavailable, ReasonRackUnavailable)
	if text := err.Error(); !strings.Contains(text, "connection refused") ||
		strings.Contains(text, "/v1/") || strings.Contains(text, "127.0.0.1") {
		t.Errorf("%v should say what failed, without the URL", err)
	}
}

func TestOX9AnUntrustedCertificateIsUnavailableAndSaysSo(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Config.ErrorLog = nil
	t.Cleanup(server.Close)
	err := viewing(t.Context(), controllerFor(t, server.URL))
	wantFailure(t, err, codes.Unavailable, ReasonRackUnavailable)
	if !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%v does not mention the certificate", err)
	}
}

// silentRack takes requests and never answers.
func silentRack(t *testing.T) *Controller {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then does the server see the caller go
		<-r.Context().Done()
	}))
	t.Cleanup(server.Close)
	return controllerFor(t, server.URL)
}

func TestOX11TheCallersTimeLimitsEveryRequest(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	wantFailure(t, viewing(ctx, silentRack(t)), codes.DeadlineExceeded, ReasonDeadlineExceeded)

	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(30*time.Millisecond, cancel)
	wantFailure(t, viewing(ctx, silentRack(t)), codes.Canceled, ReasonCanceled)
}

func TestOX11ACallThatEndsAtItsDeadlineIsOutOfTime(t *testing.T) {
	// gRPC cancels a call when its time is up, and the context may hear of that first.
	for left, want := range map[time.Duration]codes.Code{
		0: codes.DeadlineExceeded, time.Millisecond: codes.DeadlineExceeded,
		time.Hour: codes.Canceled,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), left)
		cancel()
		if got := grpcCode(transportError(ctx, "read disk", context.Canceled)); got != want {
			t.Errorf("canceled %s before the deadline: got %s, want %s", left, got, want)
		}
	}
}

func TestAnExplanationThatBreaksOffIsNoAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "500")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, `{"request_id":"r-1","error_code":"ObjectAl`)
	}))
	t.Cleanup(server.Close)
	err := viewing(t.Context(), controllerFor(t, server.URL))
	wantFailure(t, err, codes.Unavailable, ReasonRackUnavailable)
}

func TestFailMakesOneBoundedLine(t *testing.T) {
	err := fail(codes.Internal, ReasonInternal, "a\nb\x00c\xff %s", strings.Repeat("x", 5000))
	message := status.Convert(err).Message()
	if !strings.HasPrefix(message, "Internal: a b c� x") || len(message) > 1100 {
		t.Errorf("got %d bytes: %.60q", len(message), message)
	}
}

func TestFinishedErrorsHaveAReason(t *testing.T) {
	for _, test := range []struct {
		err    error
		code   codes.Code
		reason Reason
	}{
		{errors.New("bare"), codes.Internal, ReasonInternal},
		{status.Error(codes.Unknown, "whatever"), codes.Internal, ReasonInternal},
		{status.FromContextError(context.DeadlineExceeded).Err(), codes.DeadlineExceeded,
			ReasonDeadlineExceeded},
		{status.FromContextError(context.Canceled).Err(), codes.Canceled, ReasonCanceled},
		{status.Error(codes.Unimplemented, "method X not implemented"), codes.Unimplemented,
			ReasonNotSupported},
		{status.Error(codes.NotFound, "lost"), codes.NotFound, ReasonInternal},
		{fail(codes.NotFound, ReasonVolumeNotFound, "lost"), codes.NotFound, ReasonVolumeNotFound},
	} {
		wantFailure(t, finished(test.err), test.code, test.reason)
	}
}
