package proof_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestAFigureIsAddedToTheFileThatTheEnvironmentNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "figures")
	t.Setenv("PROOF_FIGURES", path)
	for _, line := range []string{proof.Line("a", "n", 1), proof.Line("b", "n", 2, "m", "x")} {
		csitest.Must(t, proof.Print(line))
	}
	got, err := os.ReadFile(path)
	csitest.Must(t, err)
	if want := "FIGURE a n=1\nFIGURE b n=2 m=x\n"; string(got) != want {
		t.Errorf("the file contains %q, want %q", got, want)
	}
}

func TestTheEnvironmentSetsTheSeedAndTheFormOfAProof(t *testing.T) {
	t.Setenv("PROOF_SEED", "7")
	t.Setenv("PROOF_DURATION", "1h")
	p := proof.New(t, "some-proof")
	if p.Seed != 7 || !p.Long() || p.Over() {
		t.Errorf("seed %d, long %t, over %t; want 7, true, false", p.Seed, p.Long(), p.Over())
	}
	t.Setenv("PROOF_SHARES", "3600000000000")
	if p := proof.New(t, "some-proof"); !p.Long() || !p.Over() {
		t.Errorf("a nanosecond: long %t, over %t; want true, true", p.Long(), p.Over())
	}
	t.Setenv("PROOF_SEED", "")
	t.Setenv("PROOF_DURATION", "")
	if p = proof.New(t, "some-proof"); p.Long() || p.Over() {
		t.Errorf("without a duration: long %t, over %t; want false, false", p.Long(), p.Over())
	}
}
