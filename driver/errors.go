package driver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fail makes the status error a CO sees: "Reason: sentence", on one line, without details (CSI
// wants them empty).
func fail(code codes.Code, reason Reason, format string, args ...any) error {
	return status.Error(code, string(reason)+": "+plain(fmt.Sprintf(format, args...)))
}

// rackToken is what a token of the rack looks like, wherever it may have got into.
var rackToken = regexp.MustCompile(`oxide-token-[A-Za-z0-9_.-]*`)

// plain makes text fit to be shown to anybody: one line of bounded length, valid UTF-8, no token.
// The text may come from whatever answered in the rack's place.
func plain(text string) string {
	const most = 1000
	text = plainToken(strings.ToValidUTF8(text, "�"))
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strings.TrimSpace(text)
}

func plainToken(text string) string { return rackToken.ReplaceAllString(text, "***") }

// statusError turns an error of the Oxide client into the status the CO sees. It is the default for
// answers that no RPC has a better word for; what a refusal means for an object is decided from the
// object's state, which the RPC reads again. doing names the call: "create disk".
func statusError(ctx context.Context, doing string, err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) {
		return transportError(ctx, doing, err)
	}
	if torn(answer) {
		// The client's own text would show the answer's headers and what there is of its body.
		return transportError(ctx, doing, fmt.Errorf("one with HTTP %d broke off",
			answer.HTTPResponse.StatusCode))
	}
	why := answerText(answer)
	switch {
	case errors.Is(err, oxide.ErrHTTP401):
		return fail(codes.Unauthenticated, ReasonTokenRejected, "%s: the rack does not accept the "+
			"token: %s; put a valid one into OXIDE_TOKEN or the token file", doing, why)
	case errors.Is(err, oxide.ErrHTTP403):
		return fail(codes.PermissionDenied, ReasonRoleMissing, "%s: the token's user may not do "+
			"this: %s; give it the role limited-collaborator on the project", doing, why)
	case errors.Is(err, oxide.ErrObjectNotFound):
		return fail(codes.NotFound, ReasonObjectNotFound, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrHTTP404):
		return fail(codes.Internal, ReasonRackUnknown, "%s: what answers at OXIDE_HOST does not "+
			"know this call: %s; look whether it is the rack's address and its release at least "+
			"v20", doing, why)
	case errors.Is(err, oxide.ErrHTTP507), errors.Is(err, oxide.ErrInsufficientCapacity):
		return fail(codes.ResourceExhausted, ReasonRackFull, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrConflict):
		return fail(codes.FailedPrecondition, ReasonConflict, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrObjectAlreadyExists):
		return fail(codes.AlreadyExists, ReasonNameTaken, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrInvalidValue):
		return fail(codes.OutOfRange, ReasonValueRefused, "%s: %s", doing, why)
	case temporary(answer):
		return fail(codes.Unavailable, ReasonRackUnavailable, "%s: the rack cannot answer now: %s",
			doing, why)
	}
	return fail(codes.Internal, ReasonRackError, "%s: %s", doing, why)
}

// temporary reports whether the same call may be answered in a moment: the rack's own failures, and
// what a proxy before it says when it gave up. A change may have been made behind such an answer,
// so a code that ends the call would leave behind what nobody knows of.
func temporary(answer *oxide.HTTPError) bool {
	switch code := answer.HTTPResponse.StatusCode; code {
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return true
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return false
	default:
		return code >= http.StatusInternalServerError
	}
}

// torn says whether the connection broke within the rack's explanation. What it was about to say is
// then not known.
func torn(answer *oxide.HTTPError) bool {
	return answer.ErrorResponse == nil &&
		answer.HTTPResponse.ContentLength > int64(len(answer.RawBody))
}

// transportError is for a call that got no whole answer. It may have had its effect, so the codes
// are those after which a CO asks again.
func transportError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(ctx.Err(), context.Canceled) && !outOfTime(ctx):
		return fail(codes.Canceled, ReasonCanceled, "%s: the caller stopped waiting", doing)
	case ctx.Err() != nil:
		return fail(codes.DeadlineExceeded, ReasonDeadlineExceeded, "%s: the rack did not answer "+
			"in time; the rack goes on with it, and a repeated call finds the result", doing)
	}
	return fail(codes.Unavailable, ReasonRackUnavailable, "%s: no whole answer from the rack: %s",
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

// answerText is the rack's message with its request id. A body that is not the rack's JSON (a
// proxy's page) is not shown.
func answerText(answer *oxide.HTTPError) string {
	code := answer.HTTPResponse.StatusCode
	if answer.ErrorResponse == nil || answer.ErrorResponse.Message == "" {
		return fmt.Sprintf("HTTP %d without an explanation of the rack's", code)
	}
	text := strings.TrimRight(plain(answer.ErrorResponse.Message), ". ")
	if id := answer.ErrorResponse.RequestId; id != "" {
		return fmt.Sprintf("%s (HTTP %d, request %s)", text, code, id)
	}
	return fmt.Sprintf("%s (HTTP %d)", text, code)
}

func isNotFound(err error) bool { return status.Code(err) == codes.NotFound }

func isAlreadyExists(err error) bool { return status.Code(err) == codes.AlreadyExists }

// wrongAnswer is for an answer that contradicts the call: a success that cannot be believed.
func wrongAnswer(doing, format string, args ...any) error {
	return fail(codes.Internal, ReasonRackAnswerWrong, "%s: the rack's answer cannot be believed: "+
		"%s", doing, fmt.Sprintf(format, args...))
}
