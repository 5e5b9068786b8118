//go:build linux

package concurrency

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// tally counts what was done and what was seen.
type tally struct {
	calls, aborted, abandoned, wrong atomic.Int64
	volumes, races, leaked           atomic.Int64

	creates, names, disks, ids   atomic.Int64
	attaches, snapshots, deletes atomic.Int64

	stages, publishes, formats, mounts atomic.Int64
}

// answers are those that a call may get besides OK: by code, the reasons that may stand there.
type answers map[codes.Code][]string

// and are these answers and more.
func (a answers) and(more answers) answers {
	both := answers{}
	for _, some := range []answers{a, more} {
		for code, reasons := range some {
			both[code] = append(both[code], reasons...)
		}
	}
	return both
}

// busy is what everybody has to be ready for: another call for the object, or the rack's own work.
var busy = answers{codes.Aborted: {"OperationPending", "DiskBusy"}}

// abandoned is what a caller sees who did not wait; the driver or the caller's own side may say it.
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

// judge counts an answer and holds it to those that are allowed. It reports whether it is OK.
func (env *environment) judge(what string, err error, allowed answers) bool {
	env.tally.calls.Add(1)
	if env.bystanders != nil {
		if harm := env.bystanders.Check(); harm != nil {
			env.fail("by the end of %s: %v", what, harm)
		}
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
	if transient(message) {
		return false
	}
	if !slices.ContainsFunc(allowed[code], func(reason string) bool {
		return strings.HasPrefix(message, reason)
	}) {
		env.fail("%s may not answer this: %v", what, err)
	}
	return false
}

// transient is an attach that the rack refused for what was over when the driver looked for the
// reason: it was taking a snapshot of the disk, or another instance still had it. The driver can
// only quote the rack then.
func transient(message string) bool {
	return strings.HasPrefix(message, "InstanceMustBeStopped: ") &&
		(strings.Contains(message, "invalid state maintenance") ||
			strings.Contains(message, "attached to another instance"))
}

// converge repeats a call until it is OK; meanwhile it gets none but the allowed answers.
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
