//go:build linux

package concurrency

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// tally counts the calls and their results.
type tally struct {
	calls, aborted, abandoned, wrong atomic.Int64
	volumes, races, leaked           atomic.Int64

	creates, names, disks, ids   atomic.Int64
	attaches, snapshots, deletes atomic.Int64

	stages, publishes, formats, mounts atomic.Int64
}

// answers are the errors that a call may get: the reasons that are allowed for each code.
type answers map[codes.Code][]string

// and returns the union of two sets of answers.
func (a answers) and(more answers) answers {
	both := answers{}
	for _, some := range []answers{a, more} {
		for code, reasons := range some {
			both[code] = append(both[code], reasons...)
		}
	}
	return both
}

// busy contains the answers that every call may get: another call works on the object, or the
// rack does.
var busy = answers{codes.Aborted: {"OperationPending", "DiskBusy"}}

// abandoned contains the answers to a caller that stopped waiting. The driver or gRPC in the
// caller may give them.
var abandoned = answers{
	codes.DeadlineExceeded: {"DeadlineExceeded", "context deadline exceeded", "stream terminated"},
	codes.Canceled:         {"Canceled", "context canceled", "stream terminated"},
}

func codeOf(err error) codes.Code { return status.Code(err) }

// fail reports a failure and counts it.
func (env *environment) fail(format string, args ...any) {
	env.tally.wrong.Add(1)
	env.t.Errorf(format, args...)
}

// judge counts an answer, and reports a failure unless the answer is OK or allowed. It reports
// whether the answer is OK.
func (env *environment) judge(what string, err error, allowed answers) bool {
	env.tally.calls.Add(1)
	if harm := env.Bystanders.Check(); harm != nil {
		env.fail("by the end of %s: %v", what, harm)
	}
	code := codeOf(err)
	switch code {
	case codes.OK:
		return true
	case codes.Aborted:
		env.tally.aborted.Add(1)
	case codes.Canceled, codes.DeadlineExceeded:
		env.tally.abandoned.Add(1)
	}
	message := status.Convert(err).Message()
	if !slices.ContainsFunc(allowed[code], func(reason string) bool {
		return strings.HasPrefix(message, reason)
	}) {
		env.fail("%s may not answer this: %v", what, err)
	}
	return false
}

// method is a method of one of the driver's clients.
type method[Req, Resp any] func(context.Context, Req, ...grpc.CallOption) (Resp, error)

// ask calls a method until it is OK, and returns the answer. See converge.
func ask[Req, Resp any](ctx context.Context, env *environment, allowed answers,
	method method[Req, Resp], req Req) (answer Resp) {
	env.converge(ctx, nameOf(req), allowed, func(ctx context.Context) (err error) {
		answer, err = method(ctx, req)
		return err
	})
	return answer
}

// nameOf returns the name of the call with such a request.
func nameOf(request any) string { return reflect.TypeOf(request).Elem().Name() }

// converge repeats a call until it is OK. Until then, the call may get only the allowed
// answers.
func (env *environment) converge(ctx context.Context, what string, allowed answers,
	call func(context.Context) error) {
	err := harness.Await(ctx, patience, func() error {
		err := call(ctx)
		if !env.judge(what, err, allowed) {
			return err
		}
		return nil
	})
	if err != nil {
		env.fail("%s does not converge: %v", what, err)
	}
}
