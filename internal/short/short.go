// Package short reduces the tests that run under go test -short. A test with many similar cases
// tries some of them (Some). A test that only repeats what the tests of whole programs show is
// skipped (Skip). "make proofs" runs all cases. PROOF_SEED changes the selection.
package short

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// Some returns n of the cases under go test -short, in their order. Otherwise it returns all.
func Some[T any](t testing.TB, n int, cases []T) []T {
	t.Helper()
	if !testing.Short() || len(cases) <= n {
		return cases
	}
	Left(t, len(cases)-n)
	name := fnv.New64a()
	fmt.Fprint(name, t.Name(), " ", cmp.Or(os.Getenv("PROOF_SEED"), "1"))
	chosen := rand.New(rand.NewPCG(name.Sum64(), 0)).Perm(len(cases))[:n]
	slices.Sort(chosen)
	some := make([]T, n)
	for i, c := range chosen {
		some[i] = cases[c]
	}
	return some
}

// Left logs how many cases are left to "make proofs". The Makefile adds up these numbers.
func Left(t testing.TB, cases int) {
	t.Helper()
	if testing.Short() && cases > 0 {
		t.Logf("%d cases are left to make proofs", cases)
	}
}

// Skip skips a test under go test -short. The parameter is the number of the test's cases.
func Skip(t testing.TB, cases int) {
	t.Helper()
	if testing.Short() {
		Left(t, cases)
		t.SkipNow()
	}
}
