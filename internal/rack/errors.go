package rack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Error converts an error of the Oxide client to the error that the CO sees. It is the default:
// where a refusal depends on an object, the RPC reads the object again and decides from its state.
// doing names the call: "create disk".
func Error(ctx context.Context, doing string, err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) {
		return transportError(ctx, doing, err)
	}
	if !own(answer) {
		return notTheRack(ctx, doing, answer)
	}
	why := AnswerText(answer)
	switch {
	case errors.Is(err, oxide.ErrHTTP401):
		return csierr.New(csierr.TokenRejected, "%s: the rack does not accept the token: %s; set a "+
			"valid one in OXIDE_TOKEN or the token file", doing, why)
	case errors.Is(err, oxide.ErrHTTP403):
		return csierr.New(csierr.RoleMissing, "%s: the token's user may not do "+
			"this: %s; give it the role limited-collaborator on the project", doing, why)
	case errors.Is(err, oxide.ErrObjectNotFound):
		return csierr.New(csierr.ObjectNotFound, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrHTTP507), errors.Is(err, oxide.ErrInsufficientCapacity):
		return csierr.New(csierr.RackFull, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrConflict):
		return csierr.New(csierr.Conflict, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrObjectAlreadyExists):
		return csierr.New(csierr.NameTaken, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrInvalidValue):
		return csierr.New(csierr.ValueRefused, "%s: %s", doing, why)
	case !Definite(err), answer.HTTPResponse.StatusCode == http.StatusTooManyRequests:
		return csierr.New(csierr.RackUnavailable, "%s: the rack cannot answer now: %s", doing, why)
	}
	return csierr.New(csierr.RackError, "%s: %s", doing, why)
}

// own reports whether an error response is the rack's: its error code, and the request id of the
// header, whole. Any other response, whatever its status, is from a server between driver and rack,
// and does not show whether the request had an effect.
func own(answer *oxide.HTTPError) bool {
	r := answer.ErrorResponse
	return r != nil && r.ErrorCode != "" && r.RequestId != "" &&
		r.RequestId == answer.HTTPResponse.Header.Get("X-Request-Id")
}

func notTheRack(ctx context.Context, doing string, answer *oxide.HTTPError) error {
	code := answer.HTTPResponse.StatusCode
	switch {
	case answer.ErrorResponse == nil && answer.HTTPResponse.ContentLength > int64(len(answer.RawBody)):
		// The client's own text would show the response's headers and the received part of its body.
		return transportError(ctx, doing, fmt.Errorf("a response with HTTP %d was truncated", code))
	case code == http.StatusNotFound:
		return csierr.New(csierr.RackUnknown, "%s: the server at OXIDE_HOST does not know this call: "+
			"%s; check that it is the rack's address and that the rack runs release v20 or later", doing,
			AnswerText(answer))
	}
	return csierr.New(csierr.RackUnavailable, "%s: %s; the rack's error code and request id are not "+
		"in it: a server between driver and rack answers in its place, or changes X-Request-Id", doing,
		AnswerText(answer))
}

// transportError returns the error for a call without a complete response. The call may have had
// its effect, so the error has a code after which a CO repeats the call.
func transportError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(ctx.Err(), context.Canceled) && !outOfTime(ctx):
		return csierr.New(csierr.Canceled, "%s: the caller stopped waiting", doing)
	case ctx.Err() != nil:
		return csierr.New(csierr.DeadlineExceeded, "%s: the rack did not answer in time; it continues "+
			"the request, and a repeated call finds the result", doing)
	}
	return csierr.New(csierr.RackUnavailable, "%s: incomplete response from the rack: %s",
		doing, transportText(err))
}

// outOfTime reports whether the caller's deadline has passed. gRPC cancels the call at the
// deadline, sometimes slightly before the context's own timer fires.
func outOfTime(ctx context.Context) bool {
	const little = 5 * time.Millisecond
	deadline, limited := ctx.Deadline()
	return limited && time.Until(deadline) < little
}

var address = regexp.MustCompile(`(dial|read|write|local error|remote error) tcp [^ ]+: |` +
	`lookup [^ ]+( on [^ ]+)?: `)

var otherNames = regexp.MustCompile(`x509: (certificate is (not )?valid for|` +
	`cannot validate certificate for) .*`)

// transportText shortens an error of net/http, which the client wraps as text behind the URL. It
// removes the rack's address, because the message may reach people who should not see it.
func transportText(err error) string {
	text := err.Error()
	if _, after, ok := strings.Cut(text, `": `); ok {
		text = after
	}
	text = address.ReplaceAllString(text, "")
	text = otherNames.ReplaceAllString(text, "x509: certificate is for other names than the one in "+
		"OXIDE_HOST")
	if strings.Contains(text, "x509: certificate signed by unknown authority") {
		text += "; put the certificate of the rack's authority into OXIDE_CA_FILE"
	}
	return text
}

// AnswerText returns the rack's message with its request id. It does not show a body that is not
// the rack's JSON, such as a proxy's page.
func AnswerText(answer *oxide.HTTPError) string {
	code := answer.HTTPResponse.StatusCode
	if answer.ErrorResponse == nil || answer.ErrorResponse.Message == "" {
		return fmt.Sprintf("HTTP %d without an error message of the rack", code)
	}
	text := strings.TrimRight(csierr.Plain(answer.ErrorResponse.Message), ". ")
	if id := answer.ErrorResponse.RequestId; id != "" {
		return fmt.Sprintf("%s (HTTP %d, request %s)", text, code, id)
	}
	return fmt.Sprintf("%s (HTTP %d)", text, code)
}

// InvalidResponse returns the error for a successful response that contradicts the call.
func InvalidResponse(doing, format string, args ...any) error {
	return csierr.New(csierr.RackResponseInvalid, "%s: invalid response from the rack: "+
		"%s", doing, fmt.Sprintf(format, args...))
}

// Definite reports whether an error shows that a change was not made: the rack itself has refused
// it. A failure inside the rack may come after the effect.
func Definite(err error) bool {
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) || !own(answer) {
		return false
	}
	code := answer.HTTPResponse.StatusCode
	return http.StatusBadRequest <= code && code < http.StatusInternalServerError &&
		code != http.StatusRequestTimeout || code == http.StatusInsufficientStorage
}
