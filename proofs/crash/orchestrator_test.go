//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// retryPatience limits how long the orchestrator repeats a call, and refusalPatience how long it
// repeats a call that is refused. callTimeout limits each call. It is kubelet's: a call that reads
// a whole disk takes long on a busy machine, and a dry run makes it once.
const (
	retryPatience   = 60 * time.Second
	refusalPatience = 15 * time.Second
	callTimeout     = 2 * time.Minute
)

// patienceFor returns how long the orchestrator repeats a call that is answered with the code.
func patienceFor(code codes.Code) time.Duration {
	if code == codes.FailedPrecondition || code == codes.Internal {
		return refusalPatience
	}
	return retryPatience
}

// retryable contains the codes after which the orchestrator repeats the call. With any other error
// the trial fails.
var retryable = []codes.Code{
	codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Internal,
	codes.FailedPrecondition,
}

// callOnce makes a step's call.
func (st step) callOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return st.call(ctx)
}

// callUntilOK repeats a step's call until it succeeds, and returns the errors until then.
func (st step) callUntilOK(ctx context.Context) (replies []string, err error) {
	start := time.Now()
	backoff := harness.Backoff{Next: 10 * time.Millisecond, Max: 500 * time.Millisecond}
	for {
		err := st.callOnce(ctx)
		if err == nil {
			if st.then != nil {
				err = st.then()
			}
			return replies, err
		}
		code := status.Code(err)
		replies = append(replies, fmt.Sprintf("%s: %s", st, status.Convert(err).Message()))
		switch {
		case !slices.Contains(retryable, code):
			return replies, fmt.Errorf("%s: no orchestrator would repeat after %s", st, code)
		case time.Since(start) > patienceFor(code):
			return replies, fmt.Errorf("%s does not converge: %s after %s", st, code, patienceFor(code))
		}
		if err := backoff.Wait(ctx); err != nil {
			return replies, err
		}
	}
}

// runSteps runs steps one after the other, each until it succeeds.
func runSteps(ctx context.Context, steps []step) (replies []string, err error) {
	for _, st := range steps {
		more, err := st.callUntilOK(ctx)
		replies = append(replies, more...)
		if err != nil {
			return replies, err
		}
	}
	return replies, nil
}

// finish ends a lifecycle, and returns an error if something of it remains.
func (l *lifecycle) finish(ctx context.Context) error {
	var errs []error
	if strings.HasPrefix(l.kind, deviceless) {
		errs = append(errs, l.mendDevices(ctx)) // an orchestrator that gave up has not done this
	}
	for _, v := range l.volumes {
		errs = append(errs, v.removeDirs(), l.checkChanges(v))
	}
	return errors.Join(append(errs, l.Bystanders.Harm(), l.checkClean(ctx))...)
}

// checkChanges returns an error unless the changes of a volume in the nodes' flight recorders are
// possible, with one format.
func (l *lifecycle) checkChanges(v *volume) error {
	if v.created == nil {
		return nil
	}
	formatted, doubtful, mounted := 0, 0, false
	for _, node := range []string{driverA, driverB} {
		changes, err := harness.Changes(l.plugins[node].FlightFile(v.created.GetVolumeId()))
		if err == nil {
			err = harness.CheckChanges(changes)
		}
		if err != nil {
			return fmt.Errorf("the flight recorder of %s: %w", node, err)
		}
		for _, c := range changes {
			mounted = mounted || c.Event == "Mounted" && c.Outcome == "done"
			switch {
			case c.Event != "Formatted":
			case c.Outcome == "done":
				formatted++
			default:
				doubtful++
			}
		}
	}
	// The filesystem of a restored volume was made for the volume of its snapshot.
	if formatted > 1 || mounted && v.source == nil && formatted+doubtful == 0 {
		return fmt.Errorf("the flight recorders contain %[2]d formats of volume %[1]s, want one",
			v.created.GetVolumeId(), formatted)
	}
	return nil
}

// formatErrors lists the errors, and counts equal ones in a row.
func formatErrors(replies []string) string {
	var lines []string
	for i := 0; i < len(replies); {
		times := 1
		for i+times < len(replies) && replies[i+times] == replies[i] {
			times++
		}
		line := replies[i]
		if times > 1 {
			line = fmt.Sprintf("%s (%d times)", line, times)
		}
		lines = append(lines, line)
		i += times
	}
	if len(lines) == 0 {
		return "OK"
	}
	return strings.Join(lines, "\n    ")
}
