package harness

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// ErrorRules is a client interceptor that holds every error of the driver to CSI's Error Scheme
// and to our own manners (errorFault). An error that breaks them reaches the caller as DATA_LOSS,
// a code that nothing expects, with a message that says what is wrong with the error.
func ErrorRules(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(options, grpc.Trailer(&trailer))...)
	// A server's error is a trailer and nothing before it. An error without one was made on this
	// side: a lost connection, or a deadline, which may pass in the middle of a good response.
	// The deadline may pass between the server's error and its reading, too, or while the server's
	// gRPC still reads the request: then it answers itself, maybe before the timer of this side ran.
	if err == nil || len(trailer) == 0 || ended(ctx) != nil &&
		status.Convert(err).Message() == ended(ctx).Error() {
		return err
	}
	if err := noteReason(status.Convert(err)); err != nil {
		return err
	}
	if fault := errorFault(status.Convert(err)); fault != "" {
		return status.Errorf(codes.DataLoss, "%s answered an error that %s: %v", method, fault, err)
	}
	return err
}

// ended is ctx.Err, also if the timer of its deadline has not run yet.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && time.Until(deadline) <= 0 {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// reasonAndSentence is how a message begins: a reason for programs and dashboards, then a sentence
// for people.
var reasonAndSentence = regexp.MustCompile(`^[A-Z][A-Za-z0-9]+: \S`)

// errorFault says what is wrong with an error of the driver, or "".
func errorFault(s *status.Status) string {
	message := s.Message()
	switch {
	case len(s.Details()) > 0:
		return fmt.Sprintf("carries details, which must stay empty (%v)", s.Details())
	case strings.TrimSpace(message) == "":
		return "has no message"
	case strings.ContainsAny(message, "\n\r"):
		return "has a message of several lines"
	case strings.Contains(message, TokenPrefix):
		return "shows the rack's token"
	case strings.Contains(message, Canary):
		return "shows what the caller must keep to itself"
	}
	switch s.Code() {
	case codes.Unimplemented:
		// gRPC itself and the generated code answer it, with texts of their own.
		return ""
	case codes.Unknown, codes.DataLoss:
		return "has a code that CSI does not use"
	}
	if !reasonAndSentence.MatchString(message) {
		return "does not begin with a reason and a sentence"
	}
	return ""
}

// ErrorFaultOf is errorFault for an error as a client has it.
func ErrorFaultOf(err error) string { return errorFault(status.Convert(err)) }

// TokenPrefix begins every token of a rack, and canary is in every secret, mount flag and token
// that the specs plant. Neither may appear in an error or a log.
const (
	TokenPrefix = "oxide-token-"
	Canary      = "tweetytweety"
)
