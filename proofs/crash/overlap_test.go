//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// overlapTimeout is how long the orchestrator waits for the second process, which may have to
// wait for the first one.
const overlapTimeout = 3 * time.Second

// secondProcess is the context key that sends calls to the second node driver.
type secondProcess struct{}

// driver returns the client of the node driver to which a call goes.
func (env *environment) driver(ctx context.Context, node string) csi.NodeClient {
	if ctx.Value(secondProcess{}) != nil {
		node = beside
	}
	return env.plugins[node].Node()
}

// overlapped makes a step's call. While the process stands still at the point, overlapped
// makes the same call, and the following calls on the node, to a second process of the driver.
// The effects of the calls that the second process answers with OK must outlive everything
// that the first process does afterwards.
func (l *lifecycle) overlapped(ctx context.Context, t trial) (paused bool, replies []string,
	err error) {
	st := l.steps[t.step]
	order := l.order(st.watched, l.plugins[st.watched].PID(), &t.trace)
	if err := l.watcher.Watch(order); err != nil {
		return false, nil, err
	}
	var first, second error
	report, err := l.watcher.ReleaseAtPause(func() { first = st.callOnce(ctx) }, func() {
		replies, second = l.callSecondProcess(context.WithValue(ctx, secondProcess{}, true), t.step)
	})
	replies = append(replies, fmt.Sprintf("%s: %v (this is the first process)", st, first))
	switch {
	case err != nil:
		return report.Paused, replies, err
	case second != nil:
		return report.Paused, replies, second
	case !report.Paused:
		l.effects = report.Effects
	}
	l.overlaps++
	more, err := runSteps(ctx, l.steps[l.stageBefore(t.step):])
	return report.Paused, append(replies, more...), err
}

// callSecondProcess makes the calls to the second process, until one is refused.
func (l *lifecycle) callSecondProcess(ctx context.Context, from int) (replies []string, err error) {
	for _, st := range l.steps[from:] {
		if st.on != driverA || st.rpc == "ControllerUnpublishVolume" {
			return replies, nil
		}
		short, cancel := context.WithTimeout(ctx, overlapTimeout)
		answer := st.call(short)
		cancel()
		replies = append(replies, fmt.Sprintf("%s: %v (this is the second process)", st, answer))
		switch code := status.Code(answer); {
		case code != codes.OK && !slices.Contains(retryable, code):
			return replies, fmt.Errorf("%s: no orchestrator would repeat after %s", st, code)
		case code != codes.OK:
			return replies, nil
		case st.then != nil:
			if err := st.then(); err != nil {
				return replies, err
			}
		}
	}
	return replies, nil
}

// stageBefore returns the step at which the orchestrator begins again, because the calls to
// the second process may have undone something that the step needs.
func (l *lifecycle) stageBefore(i int) int {
	if rpc := l.steps[i].rpc; rpc != "NodePublishVolume" {
		return i
	}
	for ; l.steps[i].rpc != "NodeStageVolume"; i-- {
	}
	return i
}
