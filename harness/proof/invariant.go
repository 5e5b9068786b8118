package proof

import (
	"sync/atomic"
	"testing"
)

// Invariant counts how often something that must not change was compared with what it was.
type Invariant struct {
	// Name is its figure's.
	Name string

	trials, changed atomic.Int64
}

// Checked counts a comparison, and passes on its error.
func (i *Invariant) Checked(err error) error {
	i.trials.Add(1)
	if err != nil {
		i.changed.Add(1)
	}
	return err
}

// Report prints the figure. An invariant that was never checked, or was found broken, fails the
// test.
func (i *Invariant) Report(t testing.TB, proof string) {
	t.Helper()
	trials, changed := i.trials.Load(), i.changed.Load()
	if err := Print(Line(i.Name, "proof", proof, "trials", trials, "changed", changed)); err != nil {
		t.Error(err)
	}
	if trials == 0 || changed > 0 {
		t.Errorf("%s: %d comparisons, %d of them with a change", i.Name, trials, changed)
	}
}
