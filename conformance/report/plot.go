package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// This is the size of a plot in units of its viewBox, which are pixels on a large screen.
const (
	plotWidth  = 320.0
	plotHeight = 26.0
	plotMargin = 6.0
	barWidth   = 3.0
	barStep    = 4.0
)

// latencies has the plots of the calls of one kind.
type latencies struct {
	Title string
	Axis  axis
	Rows  []latencyRow
}

// latencyRow has the numbers of one operation and their plot.
type latencyRow struct {
	Calls
	P50, P95, Max string
	// Text describes the plot in words.
	Text string
	// Bars is a path with a bar for each interval of time in which calls ended.
	Bars             string
	XP50, XP95, XMax string
}

// axis is a logarithmic axis over whole powers of ten of a millisecond.
type axis struct {
	low, high float64
	Ticks     []tick
}

type tick struct{ X, Label string }

// newAxis returns an axis that covers all latencies of a report. It treats less than 0.1 ms as
// 0.1 ms.
func newAxis(all []Calls) axis {
	a := axis{low: math.Inf(1), high: math.Inf(-1)}
	for _, calls := range all {
		if n := len(calls.Milliseconds); n > 0 {
			a.low = min(a.low, math.Floor(decade(calls.Milliseconds[0])))
			a.high = max(a.high, math.Ceil(decade(calls.Milliseconds[n-1])))
		}
	}
	if a.low > a.high {
		a.low, a.high = 0, 1
	}
	a.high = max(a.high, a.low+1)
	step := math.Ceil((a.high - a.low) / 6)
	for power := a.low; power <= a.high; power += step {
		a.Ticks = append(a.Ticks, tick{X: pixels(a.at(power)), Label: powerOfTen(power)})
	}
	return a
}

func decade(ms float64) float64 { return math.Log10(max(ms, 0.1)) }

// powerOfTen returns a label of the axis: "10 ms", "1 s", "100 s".
func powerOfTen(power float64) string {
	if power >= 3 {
		return fmt.Sprintf("%g s", math.Pow(10, power-3))
	}
	return fmt.Sprintf("%g ms", math.Pow(10, power))
}

// x returns the position of a latency on the axis.
func (a axis) x(ms float64) float64 { return a.at(decade(ms)) }

// at returns the position of a power of ten of a millisecond on the axis.
func (a axis) at(power float64) float64 {
	return plotMargin + (power-a.low)/(a.high-a.low)*(plotWidth-2*plotMargin)
}

func pixels(x float64) string { return fmt.Sprintf("%.1f", x) }

// plots returns the latencies of the API and of the RPCs on one axis. A kind without calls is
// left out.
func plots(all []Calls) []latencies {
	a := newAxis(all)
	var found []latencies
	for _, kind := range []struct {
		kind  Kind
		title string
	}{{API, "Calls of the API"}, {RPC, "RPCs of the driver"}} {
		l := latencies{Title: kind.title, Axis: a}
		for _, calls := range all {
			if calls.Kind == kind.kind {
				l.Rows = append(l.Rows, a.row(calls))
			}
		}
		slices.SortStableFunc(l.Rows, func(x, y latencyRow) int {
			return strings.Compare(x.Operation, y.Operation)
		})
		if len(l.Rows) > 0 {
			found = append(found, l)
		}
	}
	return found
}

func (a axis) row(calls Calls) latencyRow {
	p50, p95, slowest := calls.Quantile(0.5), calls.Quantile(0.95), calls.Quantile(1)
	row := latencyRow{Calls: calls}
	if len(calls.Milliseconds) == 0 {
		row.P50, row.P95, row.Max, row.Text = "–", "–", "–", calls.Operation+": no call"
		return row
	}
	row.P50, row.P95, row.Max = inMilliseconds(p50), inMilliseconds(p95), inMilliseconds(slowest)
	row.XP50, row.XP95, row.XMax = pixels(a.x(p50)), pixels(a.x(p95)), pixels(a.x(slowest))
	row.Text = fmt.Sprintf("%s: of %s half took at most %s, 95 of 100 at most %s, the slowest %s",
		calls.Operation, plural(calls.Count, "call"), row.P50, row.P95, row.Max)
	row.Bars = a.bars(calls.Milliseconds)
	return row
}

// bars returns the path of the bars. The height of a bar is proportional to the square root of
// its number of calls, so that a single slow call stays visible.
func (a axis) bars(samples []float64) string {
	heights := map[int]float64{}
	highest := 0.0
	for _, ms := range samples {
		bin := int((a.x(ms) - plotMargin) / barStep)
		heights[bin]++
		highest = max(highest, heights[bin])
	}
	var path strings.Builder
	for bin := range int(plotWidth / barStep) {
		if heights[bin] == 0 {
			continue
		}
		height := max(3, math.Sqrt(heights[bin]/highest)*(plotHeight-6))
		fmt.Fprintf(&path, "M%.0f %.1fh%.0fv%.1fh-%.0fz", plotMargin+float64(bin)*barStep,
			(plotHeight-height)/2, barWidth, height, barWidth)
	}
	return path.String()
}
