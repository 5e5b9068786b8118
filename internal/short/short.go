// Package short leaves out a part of the tests under go test -short. A test with many similar cases
// tries only some of them (Some). A test is skipped if tests of whole programs show the same
// (Skip). The log says how many cases were left out; "make proofs" runs them, without -short.
// PROOF_SEED selects other cases.
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

// Some returns all cases. Under go test -short it selects n of them, and keeps their order.
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

// Skip skips a test under go test -short. cases is the number of cases that the test would try.
func Skip(t testing.TB, cases int) {
	t.Helper()
	if testing.Short() {
		Left(t, cases)
		t.SkipNow()
	}
}
