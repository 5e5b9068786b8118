package monitoring

import (
	stdcmp "cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// samples is the number of samples in a series: 90 minutes, unless the fault has an interval of its
// own.
const samples = 90

// target is a pod of the driver.
type target string

const (
	leader, standby target = "controller-1", "controller-2"
	nodeA, nodeB    target = "node-a", "node-b"
	keeper          target = "node-keeper"
)

// of returns the name of a series of the target, from the metric and the names and values of
// labels.
func (p target) of(metric string, labels ...string) string {
	text := fmt.Sprintf(`%s{job="oxide-csi/oxide-csi-driver",namespace="oxide-csi",pod="%s",`+
		`instance="%s:9809"`, metric, p, p)
	for i := 0; i < len(labels); i += 2 {
		text += fmt.Sprintf(`,%s="%s"`, labels[i], labels[i+1])
	}
	return text + "}"
}

// failed returns the name of the counter of a method's failures.
func (p target) failed(method, reason string) string {
	return p.of("oxide_csi_calls_total", "method", method, "code", "FailedPrecondition",
		"reason", reason)
}

// done returns the name of the counter of a method's successes.
func (p target) done(method string) string {
	return p.of("oxide_csi_calls_total", "method", method, "code", "OK", "reason", "")
}

// problems returns the name of the node keeper's counter of problems in a step.
func (p target) problems(step string) string {
	return p.of("oxide_node_keeper_problems_total", "step", step)
}

func (p target) operations(result string) string {
	return p.of("oxide_node_keeper_operations_total", "result", result)
}

// The values of series.
var (
	always0, always1 = always(0), always(1)
	// eachMinute is a counter of retries of a sidecar.
	eachMinute = fmt.Sprintf("0+1x%d", samples)
	// slowly is a counter of retries of the kubelet, which tries again every two minutes.
	slowly = counts(2)
	// restarted0 is a series of zeroes of a container that exists for 2 of every 7 minutes, and
	// restartedUp is the series "up" of its target.
	restarted0  = strings.Repeat("0 0 stale _x4 ", samples/7+1)
	restartedUp = strings.Repeat("1 1 0 0 0 0 0 ", samples/7+1)
	// fiveMinutely is a counter that begins with 1 and grows by one every five minutes, up to 10.
	fiveMinutely = "1x4 2x4 3x4 4x4 5x4 6x4 7x4 8x4 9x4 10x4"
	endsAt40     = fmt.Sprintf("1x39 stale _x%d", samples-41)
	beginsAt40   = fmt.Sprintf("_x39 0 1x%d", samples-41)
	brieflyInUse = fmt.Sprintf("0 1 0 2 0 0 1 0x%d", samples-8)
)

func always(n int) string { return fmt.Sprintf("%dx%d", n, samples) }

// counts returns a counter that grows by one at every n-th sample after the first.
func counts(n int) string {
	var text strings.Builder
	for i := range samples {
		fmt.Fprint(&text, i/n, " ")
	}
	return text.String()
}

// change returns a series that changes its value after a number of samples.
func change(from, to, after int) string {
	return fmt.Sprintf("%dx%d %dx%d", from, after-1, to, samples-after)
}

// once is a counter that grows by one in the 40th minute. since40 grows by one in each minute from
// then on, and for5 stops growing after five.
var (
	once     = change(0, 1, 40)
	since40  = fmt.Sprintf("0x39 1+1x%d", samples-41)
	for5     = fmt.Sprintf("0x39 1+1x4 5x%d", samples-46)
	awayFor5 = fmt.Sprintf("1x39 0x4 1x%d", samples-46)
)

// days returns a constant series: the time a number of days after the first sample.
func days(n int) string { return always(n * 86400) }

// healthy returns the series of a cluster with two controllers and two nodes on which volumes are
// created and deleted.
func healthy() series {
	all := series{}
	for _, p := range []target{leader, standby, nodeA, nodeB} {
		all[p.of("up")] = always1
		all[p.of("oxide_csi_build_info", "version", "v1")] = always1
		all[p.of("oxide_csi_calls_in_flight")] = brieflyInUse
		all[p.done("Probe")] = fmt.Sprintf("0+6x%d", samples)
	}
	for _, p := range []target{leader, standby} {
		all[p.of("oxide_csi_rack_up")] = always1
		all[p.of("oxide_csi_rack_token_expiry_timestamp_seconds")] = days(60)
	}
	for _, method := range []string{"CreateVolume", "ControllerPublishVolume", "CreateSnapshot"} {
		all[leader.done(method)] = counts(7)
	}
	for _, p := range []target{nodeA, nodeB} {
		all[p.of("oxide_csi_node_disks")] = always(5)
		all[p.of("oxide_csi_node_disks_limit")] = always(12)
		all[p.done("NodeStageVolume")] = counts(9)
		all[p.done("NodeGetVolumeStats")] = fmt.Sprintf("0+3x%d", samples)
	}
	return all
}

// fault has the series that differ from those of a healthy cluster, and the alerts that fire.
type fault struct {
	name     string
	differ   series
	missing  []target // pods that do not exist
	want     []string
	interval time.Duration // the time between samples, if not a minute
}

func TestEachAlertFiresInItsFaultAndInNoOther(t *testing.T) {
	wanted := map[string]bool{}
	for _, f := range slices.Concat(quiet, rackFaults, volumeFaults, processFaults,
		keeperFaults) {
		t.Run(f.name, func(t *testing.T) {
			all := healthy()
			for _, p := range f.missing {
				maps.DeleteFunc(all, func(name, _ string) bool {
					return strings.Contains(name, fmt.Sprintf("pod=%q", p))
				})
			}
			maps.Copy(all, f.differ)
			found, ever := firing(t, stdcmp.Or(f.interval, interval), all)
			if diff := cmp.Diff(append([]string{}, f.want...), names(found)); diff != "" {
				t.Errorf("expected alerts (-) and those that fire at the end (+):\n%s", diff)
			}
			if diff := cmp.Diff(append([]string{}, f.want...), append([]string{}, ever...)); diff != "" {
				t.Errorf("expected alerts (-) and those that have ever fired (+):\n%s", diff)
			}
			checkTexts(t, found)
		})
		for _, name := range f.want {
			wanted[name] = true
		}
	}
	for _, alert := range alerts(t) {
		if !wanted[alert.Alert] {
			t.Errorf("no fault makes %s fire", alert.Alert)
		}
	}
}
