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

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Error turns an error of the Oxide client into the status the CO sees. It is the default for
// answers that no RPC has a better word for; what a refusal means for an object is decided from the
// object's state, which the RPC reads again. doing names the call: "create disk".
func Error(ctx context.Context, doing string, err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) {
		return transportError(ctx, doing, err)
	}
	if truncated(answer) {
		// The client's own text would show the answer's headers and what there is of its body.
		return transportError(ctx, doing, fmt.Errorf("one with HTTP %d broke off",
			answer.HTTPResponse.StatusCode))
	}
	why := AnswerText(answer)
	switch {
	case errors.Is(err, oxide.ErrHTTP401):
		return csierr.New(csierr.TokenRejected, "%s: the rack does not accept the "+
			"token: %s; put a valid one into OXIDE_TOKEN or the token file", doing, why)
	case errors.Is(err, oxide.ErrHTTP403):
		return csierr.New(csierr.RoleMissing, "%s: the token's user may not do "+
			"this: %s; give it the role limited-collaborator on the project", doing, why)
	case errors.Is(err, oxide.ErrObjectNotFound):
		return csierr.New(csierr.ObjectNotFound, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrHTTP404):
		return csierr.New(csierr.RackUnknown, "%s: what answers at OXIDE_HOST does not "+
			"know this call: %s; look whether it is the rack's address and its release at least "+
			"v20", doing, why)
	case errors.Is(err, oxide.ErrHTTP507), errors.Is(err, oxide.ErrInsufficientCapacity):
		return csierr.New(csierr.RackFull, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrConflict):
		return csierr.New(csierr.Conflict, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrObjectAlreadyExists):
		return csierr.New(csierr.NameTaken, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrInvalidValue):
		return csierr.New(csierr.ValueRefused, "%s: %s", doing, why)
	case retryable(answer):
		return csierr.New(csierr.RackUnavailable, "%s: the rack cannot answer now: %s",
			doing, why)
	}
	return csierr.New(csierr.RackError, "%s: %s", doing, why)
}

// retryable reports whether the same call may be answered in a moment: the rack's own failures, and
// what a proxy before it says when it gave up. A change may have been made behind such an answer,
// so a code that ends the call would leave behind what nobody knows of.
func retryable(answer *oxide.HTTPError) bool {
	switch code := answer.HTTPResponse.StatusCode; code {
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return true
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return false
	default:
		return code >= http.StatusInternalServerError
	}
}

// truncated reports whether the connection broke within the rack's explanation. What it was about
// to say is then not known.
func truncated(answer *oxide.HTTPError) bool {
	return answer.ErrorResponse == nil &&
		answer.HTTPResponse.ContentLength > int64(len(answer.RawBody))
}

// transportError is for a call that got no whole answer. It may have had its effect, so the codes
// are those after which a CO asks again.
func transportError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(ctx.Err(), context.Canceled) && !outOfTime(ctx):
		return csierr.New(csierr.Canceled, "%s: the caller stopped waiting", doing)
	case ctx.Err() != nil:
		return csierr.New(csierr.DeadlineExceeded, "%s: the rack did not answer "+
			"in time; the rack goes on with it, and a repeated call finds the result", doing)
	}
	return csierr.New(csierr.RackUnavailable, "%s: no whole answer from the rack: %s",
		doing, transportText(err))
}

// outOfTime says whether the caller's time is up. At that moment gRPC cancels the call itself, and
// may be a little faster at it than the context's own clock.
func outOfTime(ctx context.Context) bool {
	const little = 5 * time.Millisecond
	deadline, limited := ctx.Deadline()
	return limited && time.Until(deadline) < little
}

// address is where net/http says what it was talking to.
var address = regexp.MustCompile(`(dial|read|write|local error|remote error) tcp [^ ]+: |` +
	`lookup [^ ]+( on [^ ]+)?: `)

// otherNames is where crypto/tls says whose a certificate is, and whose it should be.
var otherNames = regexp.MustCompile(`x509: (certificate is (not )?valid for|` +
	`cannot validate certificate for) .*`)

// transportText shortens what net/http says about a failed call: the client wraps it as text, with
// the URL in front. The message may reach people whom the rack's address is none of the business.
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

// AnswerText is the rack's message with its request id. A body that is not the rack's JSON (a
// proxy's page) is not shown.
func AnswerText(answer *oxide.HTTPError) string {
	code := answer.HTTPResponse.StatusCode
	if answer.ErrorResponse == nil || answer.ErrorResponse.Message == "" {
		return fmt.Sprintf("HTTP %d without an explanation of the rack's", code)
	}
	text := strings.TrimRight(csierr.Plain(answer.ErrorResponse.Message), ". ")
	if id := answer.ErrorResponse.RequestId; id != "" {
		return fmt.Sprintf("%s (HTTP %d, request %s)", text, code, id)
	}
	return fmt.Sprintf("%s (HTTP %d)", text, code)
}

// InvalidResponse is for an answer that contradicts the call: a success that cannot be believed.
func InvalidResponse(doing, format string, args ...any) error {
	return csierr.New(csierr.RackAnswerWrong, "%s: the rack's answer cannot be believed: "+
		"%s", doing, fmt.Sprintf(format, args...))
}

// Undecided reports whether an answer to a change leaves open whether the change was made: the rack
// or a proxy gave up on it, maybe behind its effect. A request that is at fault itself has none.
func Undecided(err error) bool {
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) || truncated(answer) || errors.Is(err, oxide.ErrInsufficientCapacity) {
		return false
	}
	code := answer.HTTPResponse.StatusCode
	return code < http.StatusBadRequest || code == http.StatusRequestTimeout ||
		code >= http.StatusInternalServerError && code != http.StatusInsufficientStorage
}
