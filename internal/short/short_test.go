package short

import (
	"flag"
	"slices"
	"testing"
)

type logger struct {
	testing.TB
	logged []any
}

func (l *logger) Helper()                      {}
func (l *logger) Name() string                 { return "a test" }
func (l *logger) Logf(_ string, values ...any) { l.logged = append(l.logged, values...) }

func TestShortModeRunsSomeCasesAndLogsHowManyItSkips(t *testing.T) {
	given := flag.Lookup("test.short").Value.String()
	t.Cleanup(func() { _ = flag.Set("test.short", given) })
	cases := []int{1, 2, 3, 4, 5, 6, 7, 8, 9}
	for _, c := range []struct {
		short        string
		n, got, left int
	}{
		{"false", 3, 9, 0}, {"true", 3, 3, 6}, {"true", 9, 9, 0}, {"true", 20, 9, 0},
	} {
		_ = flag.Set("test.short", c.short)
		log := &logger{TB: t}
		got := Some(log, c.n, cases)
		if len(got) != c.got || !slices.IsSorted(got) || len(slices.Compact(got)) != c.got ||
			slices.Equal(log.logged, []any{c.left}) != (c.left > 0) ||
			!slices.Equal(got, Some(log, c.n, cases)) {
			t.Errorf("-short=%s, %d of %v: got %v, and reported %v", c.short, c.n, cases, got, log.logged)
		}
	}
	seen := map[int]bool{}
	for _, seed := range []string{"1", "2", "3", "4", "5", "6", "7", "8", "9"} {
		t.Setenv("PROOF_SEED", seed)
		for _, c := range Some(&logger{TB: t}, 3, cases) {
			seen[c] = true
		}
	}
	if len(seen) < 8 {
		t.Errorf("nine seeds choose only %v", seen)
	}
}
