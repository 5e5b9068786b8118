package proof

import "sync/atomic"

// Invariant counts how often a state that must not change was compared with the original.
type Invariant struct {
	name            string // of the figure
	proof           *Proof
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
func (i *Invariant) Report() {
	t := i.proof.t
	t.Helper()
	trials, changed := i.trials.Load(), i.changed.Load()
	line := Line(i.name, "proof", i.proof.Name, "trials", trials, "changed", changed)
	if err := Print(line); err != nil {
		t.Error(err)
	}
	if trials == 0 || changed > 0 {
		t.Errorf("%s: %d comparisons, %d of them with a change", i.name, trials, changed)
	}
}
