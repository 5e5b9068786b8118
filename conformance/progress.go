package conformance

import (
	"fmt"
	"io"
	"time"
)

// cost is the number of requests and the time that a part takes. It was measured on the
// simulator, where a request takes almost no time.
type cost struct {
	requests int
	own      time.Duration
}

// costs are the costs of the parts.
var costs = map[string]cost{
	partRules: {1250, 7 * time.Second},
	"ext4":    {540, 2 * time.Second}, "xfs": {540, 2 * time.Second},
	"btrfs": {540, 2 * time.Second}, "block": {540, 2 * time.Second},
	partData: {780, 55 * time.Second},
}

// estimate returns the time that the parts take on a rack with the given latency.
func estimate(selected []string, latency time.Duration) time.Duration {
	var all time.Duration
	for _, part := range selected {
		all += costs[part].own + time.Duration(costs[part].requests)*latency
	}
	return all
}

// progress prints the progress of a run.
type progress struct {
	out     io.Writer
	latency time.Duration
	began   time.Time
	// expected is the estimated time of the whole run, and spent the part of it that lies behind.
	expected, spent time.Duration
	// part is the part that runs now. partDone of its partAll specs are done.
	part              string
	partDone, partAll int
}

// begin starts the count.
func (p *progress) begin(selected []string, latency time.Duration) {
	p.latency, p.began, p.expected = latency, time.Now(), estimate(selected, latency)
}

// enter starts a part.
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

// done prints a spec that has ended.
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

// left estimates the remaining time: the estimate for the rest, corrected by the ratio of the
// real and the estimated time so far.
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

// round rounds a duration so that it is readable.
func round(d time.Duration) string {
	if d < time.Minute {
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%d min", int((d + 30*time.Second).Minutes()))
}
