package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// String returns the difference as text for a terminal: the verdict, the facts, the results (the
// worsened first), the latencies, and whether anything got worse.
func (d *Difference) String() string {
	var text strings.Builder
	d.writeFacts(&text)
	d.writeResults(&text)
	d.writeLatencies(&text)
	if d.Worse() {
		text.WriteString("B is worse than A.\n")
	} else {
		text.WriteString("B is not worse than A.\n")
	}
	return text.String()
}

func (d *Difference) writeFacts(text *strings.Builder) {
	if d.VerdictA == d.VerdictB {
		fmt.Fprintf(text, "Verdict: %s in both\n", d.VerdictA)
	} else {
		fmt.Fprintf(text, "Verdict: %s in A, %s in B\n", d.VerdictA, d.VerdictB)
	}
	for _, fact := range d.Facts {
		fmt.Fprintf(text, "  %-24s %s -> %s\n", oneLine(fact.Name), orNone(fact.A), orNone(fact.B))
	}
	text.WriteString("\n")
}

func orNone(s string) string {
	if s = oneLine(s); s != "" {
		return s
	}
	return "none"
}

// oneLine replaces unprintable characters, which could change the terminal's state, and joins the
// lines.
func oneLine(s string) string {
	clean := strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return ' '
	}, s)
	return strings.Join(strings.Fields(clean), " ")
}

func (d *Difference) writeResults(text *strings.Builder) {
	changed := len(d.Worsened) + len(d.Improved) + len(d.Other)
	gone, added := d.alone()
	fmt.Fprintf(text, "Results: %d in A, %d in B\n", d.Same+changed+gone, d.Same+changed+added)
	fmt.Fprintf(text, "  %d in both: %d the same, %d worse, %d better, %d otherwise changed\n",
		d.Same+changed, d.Same, len(d.Worsened), len(d.Improved), len(d.Other))
	fmt.Fprintf(text, "  %d in A alone, %d in B alone\n", gone, added)
	for _, part := range []struct {
		title   string
		changes []ResultChange
	}{{"worse", d.Worsened}, {"better", d.Improved}, {"otherwise changed", d.Other}} {
		if len(part.changes) > 0 {
			fmt.Fprintf(text, "  %s:\n", part.title)
		}
		for _, change := range part.changes {
			fmt.Fprintf(text, "    %s: %s -> %s\n", oneLine(change.B.title()),
				change.A.Status.words(), change.B.Status.words())
			if reason := oneLine(change.B.Reason); reason != "" {
				fmt.Fprintf(text, "      %s\n", reason)
			}
		}
	}
	if len(d.Shrunk) > 0 {
		text.WriteString("  looked at less:\n")
	}
	for _, shrunk := range d.Shrunk {
		fmt.Fprintf(text, "    %s:\n      %s\n", oneLine(shrunk.title()),
			oneLine(strings.Join(shrunk.Less, "; ")))
	}
	for _, part := range []struct {
		title   string
		results []Result
		groups  map[string]int
	}{{"in B alone", d.New, d.NewGroups}, {"in A alone", d.Gone, d.GoneGroups}} {
		if len(part.results)+len(part.groups) > 0 {
			fmt.Fprintf(text, "  %s:\n", part.title)
		}
		for _, group := range slices.Sorted(maps.Keys(part.groups)) {
			fmt.Fprintf(text, "    all of %s: %d\n", oneLine(group), part.groups[group])
		}
		for _, result := range part.results {
			fmt.Fprintf(text, "    %s: %s\n", oneLine(result.title()), result.Status.words())
		}
	}
	text.WriteString("\n")
}

// alone counts the results of A alone and of B alone.
func (d *Difference) alone() (gone, added int) {
	gone, added = len(d.Gone), len(d.New)
	for _, n := range d.GoneGroups {
		gone += n
	}
	for _, n := range d.NewGroups {
		added += n
	}
	return gone, added
}

func (d *Difference) writeLatencies(text *strings.Builder) {
	fmt.Fprintf(text, "Latencies: the p50 of %d of %s changed by a factor of %g or more\n",
		len(d.Latencies), plural(d.Compared, "operation"), muchSlower)
	fmt.Fprintf(text, "  not compared: %d with fewer than %d calls in a report, "+
		"%d in one report alone\n", d.TooFew, enoughCalls, d.OneSided)
	for _, change := range d.Latencies {
		word := "slower"
		if change.Ratio < 1 {
			word = "faster"
		}
		fmt.Fprintf(text, "  %s %s: %s, p50 %s -> %s (ratio %.2f; %d and %d calls)\n", change.B.Kind,
			oneLine(change.B.Operation), word, inMilliseconds(change.A.Quantile(0.5)),
			inMilliseconds(change.B.Quantile(0.5)), change.Ratio, change.A.Count, change.B.Count)
	}
	text.WriteString("\n")
}
