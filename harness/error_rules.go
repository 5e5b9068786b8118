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

// ErrorRules is a client interceptor that checks every error of the driver against CSI's Error
// Scheme and against our own rules (errorFault). If an error breaks a rule, the caller gets
// DATA_LOSS, a code that no test expects, with a message that describes the fault.
func ErrorRules(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(options, grpc.Trailer(&trailer))...)
	// A server's error consists of a trailer alone. An error without a trailer was made by this
	// client: the connection was lost, or the deadline passed, which can happen in the middle of a
	// good response. The deadline can also pass after the server has sent its error and before
	// this client reads it, or while gRPC in the server still reads the request. Then gRPC in the
	// server answers, and its timer may be earlier than the timer of this client.
	if err == nil || len(trailer) == 0 || ended(ctx) != nil &&
		status.Convert(err).Message() == ended(ctx).Error() {
		return err
	}
	if fault := errorFault(status.Convert(err)); fault != "" {
		return status.Errorf(codes.DataLoss, "%s answered an error that %s: %v", method, fault, err)
	}
	return err
}

// ended returns ctx.Err. It returns an error, too, if the deadline has passed but its timer
// has not run yet.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && time.Until(deadline) <= 0 {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// ReasonOf returns the reason of an error that the driver answered, or "" if it has none. Messages
// of gRPC itself have no reason.
func ReasonOf(err *status.Status) string {
	if match := firstWord.FindStringSubmatch(err.Message()); match != nil {
		return match[1]
	}
	return ""
}

// firstWord matches the reason at the beginning of an error message, for programs and dashboards.
// reasonAndSentence matches the beginning of every message: the reason, then a sentence for people.
var (
	firstWord         = regexp.MustCompile(`^([A-Z][A-Za-z0-9]+): `)
	reasonAndSentence = regexp.MustCompile(`^[A-Z][A-Za-z0-9]+: \S`)
)

// errorFault describes what is wrong with an error of the driver. It returns "" if the error
// is correct.
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
		// gRPC itself and the generated code answer this code, with texts of their own.
		return ""
	case codes.Unknown, codes.DataLoss:
		return "has a code that CSI does not use"
	}
	if !reasonAndSentence.MatchString(message) {
		return "does not begin with a reason and a sentence"
	}
	return ""
}

// Every token of a rack begins with TokenPrefix. The specs put Canary into every secret, mount flag
// and token that they pass. No error and no log may contain either text.
const (
	TokenPrefix = "oxide-token-"
	Canary      = "tweetytweety"
)
