package proof

import (
	"sync/atomic"
	"testing"
)

// Invariant counts how often a state that must not change was compared with the original.
type Invariant struct {
	// Name is the name of the figure.
	Name string

	trials, changed atomic.Int64
}

// Checked counts a comparison, and returns its error unchanged.
func (i *Invariant) Checked(err error) error {
	i.trials.Add(1)
	if err != nil {
		i.changed.Add(1)
	}
	return err
}

// Report prints the figure. The test fails if the invariant was never checked, or was found
// broken.
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
