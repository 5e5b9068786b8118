package conformance

import (
	"fmt"
	"io"
	"time"
)

// cost is what a part asks of a rack and of this machine: measured on the simulator, where a
// request takes next to no time.
type cost struct {
	requests int
	own      time.Duration
}

// costs are those of the parts.
var costs = map[string]cost{
	partRules: {900, 7 * time.Second},
	"ext4":    {540, 2 * time.Second}, "xfs": {540, 2 * time.Second},
	"btrfs": {540, 2 * time.Second}, "block": {540, 2 * time.Second},
	partData: {710, 25 * time.Second},
}

// estimate is how long the parts take on a rack whose requests take that long.
func estimate(selected []string, latency time.Duration) time.Duration {
	var all time.Duration
	for _, part := range selected {
		all += costs[part].own + time.Duration(costs[part].requests)*latency
	}
	return all
}

// progress tells how far a run is.
type progress struct {
	out     io.Writer
	latency time.Duration
	began   time.Time
	// expected is how long the whole run was to take, and spent how much of that is behind it.
	expected, spent time.Duration
	// part is the one that runs, and partDone of partAll of its specs are done.
	part              string
	partDone, partAll int
}

// begin starts to count.
func (p *progress) begin(selected []string, latency time.Duration) {
	p.latency, p.began, p.expected = latency, time.Now(), estimate(selected, latency)
}

// enter begins a part.
func (p *progress) enter(part string, all int) {
	p.leave()
	p.part, p.partDone, p.partAll = part, 0, all
	fmt.Fprintf(p.out, "\n%s\n", part)
}

// leave ends the part.
func (p *progress) leave() {
	if p.part != "" {
		p.spent += estimate([]string{p.part}, p.latency)
	}
	p.part = ""
}

// done tells of a spec that has ended.
func (p *progress) done(status, name, reason string) {
	p.partDone++
	line := fmt.Sprintf("  %3d/%-3d  %-14s %s", p.partDone, p.partAll, status, name)
	if runes := []rune(line); len(runes) > 120 {
		line = string(runes[:119]) + "…"
	}
	fmt.Fprintf(p.out, "%s  [%s left]\n", line, round(p.left()))
	if reason != "" {
		fmt.Fprintf(p.out, "                          %s\n", reason)
	}
}

// left estimates the time to the end: what was expected for the rest, corrected by how the part of
// the run that is done compares with what was expected of it.
func (p *progress) left() time.Duration {
	behind := p.spent
	if p.partAll > 0 {
		behind += time.Duration(float64(estimate([]string{p.part}, p.latency)) *
			float64(p.partDone) / float64(p.partAll))
	}
	left := p.expected - behind
	if behind < time.Second {
		return left
	}
	return max(0, time.Duration(float64(left)*float64(time.Since(p.began))/float64(behind)))
}

// round makes a duration readable.
func round(d time.Duration) string {
	if d < time.Minute {
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%d min", int((d + 30*time.Second).Minutes()))
}
