package report

import (
	"cmp"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

func (s Status) words() string { return strings.ReplaceAll(string(s), "_", " ") }

// headlines has each verdict as a heading.
var headlines = map[Verdict]string{Conforms: "Conforms", BlockedByRack: "Blocked by the rack",
	Incomplete: "Incomplete", InterruptedRun: "Interrupted", DoesNotConform: "Does not conform"}

// groups are the groups of a run, unless the operator selects some.
var groups = []string{"rules", "ext4", "xfs", "btrfs", "block", "data"}

// Headline returns the verdict as a heading. It names the groups of the run unless all were to
// run.
func (r *Report) Headline() string {
	headline, selected := cmp.Or(headlines[r.Verdict], string(r.Verdict)), r.Run.Selected
	if len(selected) == 0 || !slices.ContainsFunc(groups, func(group string) bool {
		return !slices.Contains(selected, group)
	}) {
		return headline
	}
	return fmt.Sprintf("%s (only %s)", headline, strings.Join(selected, ", "))
}

// request describes the request: "disk_create POST /v1/disks", or the name of the RPC.
func (e LoggedCall) request() string {
	return strings.Join(strings.Fields(e.Operation+" "+e.Method+" "+e.Path), " ")
}

// outcome describes the answer: "400 Bad Request ObjectAlreadyExists", "NotFound".
func (e LoggedCall) outcome() string {
	var parts []string
	if e.Status != 0 {
		parts = append(parts, strconv.Itoa(e.Status), http.StatusText(e.Status))
	}
	parts = append(parts, e.Code, e.ErrorCode)
	if text := strings.Join(strings.Fields(strings.Join(parts, " ")), " "); text != "" {
		return text
	}
	return "no answer"
}

func (e LoggedCall) bad() bool {
	return e.Status >= 400 || e.ErrorCode != "" || (e.Code != "" && e.Code != "OK") ||
		(e.Status == 0 && e.Code == "")
}

// inMilliseconds returns a latency with its unit and three digits: "0.42 ms", "13 ms", "1.5 s".
func inMilliseconds(ms float64) string {
	switch {
	case ms == 0:
		return "0 ms"
	case ms < 9.95:
		return fmt.Sprintf("%.2g ms", ms)
	case ms < 999.5:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return inSeconds(ms / 1000)
}

// inSeconds returns a duration with its unit: "0.8 s", "12 s", "3 min 20 s", "1 h 2 min".
func inSeconds(seconds float64) string {
	switch {
	case seconds == 0:
		return "0 s"
	case seconds < 0.01:
		return "< 10 ms"
	case seconds < 0.9995:
		return fmt.Sprintf("%.0f ms", seconds*1000)
	case seconds < 9.95:
		return fmt.Sprintf("%.1f s", seconds)
	case seconds < 59.5:
		return fmt.Sprintf("%.0f s", seconds)
	case seconds < 3599.5:
		whole := int(math.Round(seconds))
		return strings.TrimSuffix(fmt.Sprintf("%d min %d s", whole/60, whole%60), " 0 s")
	}
	minutes := math.Round(seconds / 60)
	return fmt.Sprintf("%.0f h %.0f min", math.Floor(minutes/60), math.Mod(minutes, 60))
}

func moment(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return t.UTC().Format("2 January 2006, 15:04:05 UTC")
}

// plural returns a number with its noun: "1 call", "2 calls".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

// shellWords joins a command so that a shell splits it into the same words.
func shellWords(command []string) string {
	quoted := make([]string, len(command))
	for i, word := range command {
		quoted[i] = word
		if word == "" || strings.ContainsFunc(word, isSpecial) {
			quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}

// isSpecial reports whether the character may have a special meaning in a shell.
func isSpecial(c rune) bool {
	return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_=+,./:@%", c)
}
