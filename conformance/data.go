package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// runData checks the data on volumes. The driver is the controller here, and the node in this
// instance, in the second one and in the helper.
func (w *job) runData(ctx context.Context) (err error) {
	bench, end, err := w.bench(ctx)
	defer func() { err = errors.Join(err, end()) }()
	if err != nil {
		return fmt.Errorf("prepare the checks of data: %w", err)
	}
	checks := allChecks()
	w.progress.enter(partData, len(checks))
	for _, check := range checks {
		if ctx.Err() != nil || w.lost() != nil {
			break
		}
		w.result(w.unlessLost(ctx, w.checkData(ctx, bench, check)))
	}
	return nil
}

func (w *job) checkData(ctx context.Context, b *data.Bench, check data.Check) report.Result {
	result := report.Result{Group: partData, ID: check.ID, Name: check.Says, Source: check.Source}
	if why := check.Blocked(b); why != "" {
		result.Status, result.Reason = report.NotTested, why
		if check.Needs.Hotplug && !b.Hotplug {
			result.Status = report.Blocked
		}
		return result
	}
	if missing := check.GiB - w.room(ctx); missing > 0 {
		result.Status = report.NotTested
		result.Reason = fmt.Sprintf("not tested: it needs %d GiB more", missing)
		return result
	}
	point := len(w.calls.since(0))
	w.rack.Exchanges()
	began := time.Now()
	logged := *b
	logged.Log = &data.Log{}
	err := check.Run(ctx, &logged)
	result.Extent = logged.Log.Extent()
	calls, exchanges := w.calls.since(point), w.rack.Exchanges()
	w.note(exchanges)
	result.Tries, result.Seconds = 1, time.Since(began).Seconds()
	result.Evidence = append(evidence(calls), answers(exchanges)...)
	switch {
	case ctx.Err() != nil:
		result.Status, result.Reason = report.Interrupted, "the run was interrupted"
	case err != nil && quotaRefused(exchanges) &&
		w.room(ctx) < max(check.GiB, parts[partData].need.gib-optional):
		result.Status = report.NotTested
		result.Reason = "not tested: others use the silo's quota meanwhile: " + err.Error()
	case err != nil:
		result.Status, result.Reason = report.Failed, err.Error()
	default:
		result.Status = report.Passed
		if missing := notMade(check, calls); len(missing) > 0 {
			result.Status = report.Failed
			result.Reason = fmt.Sprintf("the check has not called %s, which it is about",
				strings.Join(missing, ", "))
		}
	}
	return result
}

// room returns how many GiB more the run may have, by its budget and by the silo's quota.
func (w *job) room(ctx context.Context) int64 {
	now, _ := w.budget.held()
	left := w.budget.limit.gib - now.gib
	if use, err := w.client.UtilizationView(ctx); err == nil {
		left = min(left, (int64(use.Capacity.Storage)-int64(use.Provisioned.Storage))/harness.GiB)
	}
	return left
}

func quotaRefused(calls []rules.RecordedCall) bool {
	return slices.ContainsFunc(calls, func(c rules.RecordedCall) bool {
		return c.Status == http.StatusInsufficientStorage
	})
}

// notMade lists the RPCs that a check is about and did not call.
func notMade(check data.Check, calls []rpc) (missing []string) {
	for _, name := range check.Calls {
		isRPC := strings.ToLower(name) != name
		if isRPC && !slices.ContainsFunc(calls, func(c rpc) bool { return c.name == name }) {
			missing = append(missing, name)
		}
	}
	return missing
}

// bench prepares the bench of the checks. The caller must call end, also after an error.
func (w *job) bench(ctx context.Context) (b *data.Bench, end func() error, err error) {
	var ends []func() error
	end = func() error {
		var errs []error
		for _, one := range slices.Backward(ends) {
			errs = append(errs, one())
		}
		return errors.Join(errs...)
	}
	driver, err := w.startDriver(ctx, harness.ModeController)
	if err != nil {
		return nil, end, fmt.Errorf("start the driver: %w", err)
	}
	ends = append(ends, driver.Stop)
	conn, err := driver.Dial(ctx, grpc.WithChainUnaryInterceptor(w.intercept))
	if err != nil {
		return nil, end, err
	}
	ends = append(ends, conn.Close)
	config := guest.Config{Plugin: w.Self["oxide-csi-plugin"]}
	here := config
	here.SysfsRoot, here.DevRoot = w.sysfsRoot, w.devRoot
	a, err := guest.Here(ctx, here)
	if err != nil {
		return nil, end, err
	}
	ends = append(ends, a.Close)
	a.Observe = w.observe
	seed, err := strconv.ParseUint(w.id, 16, 64)
	if err != nil {
		return nil, end, fmt.Errorf("read the run's ID as a number: %w", err)
	}
	var names atomic.Int64
	b = &data.Bench{Controller: csi.NewControllerClient(conn), A: a, Oxide: w.client,
		Hotplug: w.rack.Hotplug, Seed: seed, MayStop: w.mayStop,
		Name: func(what string) string {
			return fmt.Sprintf("%s-%s-%d", w.mark, what, names.Add(1))
		}}
	if w.second != nil {
		if b.B, err = w.connect(ctx, w.secondShell, config); err != nil {
			return nil, end, err
		}
		b.B.Name = "instance " + string(w.second.Name)
		ends = append(ends, b.B.Close)
		facts, err := guest.ReadFacts(ctx, b.B, guest.Nothing{})
		if err == nil && facts.InstanceID != w.second.Id {
			err = fmt.Errorf("--second-shell reaches instance %s, expected %s (%s)", facts.InstanceID,
				w.second.Name, w.second.Id)
		}
		if err != nil {
			return nil, end, err
		}
	}
	if w.helper != nil && w.guestShell != "" {
		w.started = &data.Helper{InstanceID: w.helper.Id,
			Connect: func(ctx context.Context) (*guest.AgentClient, error) {
				return w.connect(ctx, w.guestShell, config)
			}}
		b.Helper = w.started
	}
	return b, end, nil
}

func (w *job) connect(ctx context.Context, shell string, c guest.Config) (
	g *guest.AgentClient, err error) {
	if g, err = guest.Connect(ctx, strings.Fields(shell), c); err == nil {
		g.Observe = w.observe
	}
	return g, err
}

func (w *job) observe(method string, request any, began time.Time, err error) {
	w.calls.add(rpc{name: method[strings.LastIndex(method, "/")+1:], object: objectOf(request),
		code: status.Code(err), reason: reasonOf(err), tries: 1, began: began, took: time.Since(began)})
}
