// Package short chooses how much of a test runs. Under go test -short a test with many similar
// cases tries some of them, and a test that only repeats what others show with whole programs is
// skipped. Both report how many cases they leave to the whole form, which is the same test without
// -short (make proofs). PROOF_SEED selects other cases.
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

// Some returns n of the cases under go test -short, in their order, and otherwise all of them.
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

// Left reports that the test leaves cases to the whole form. The Makefile adds them up.
func Left(t testing.TB, cases int) {
	t.Helper()
	if testing.Short() && cases > 0 {
		t.Logf("%d cases are left to make proofs", cases)
	}
}

// Skip skips a test that has that many cases under go test -short.
func Skip(t testing.TB, cases int) {
	t.Helper()
	if testing.Short() {
		Left(t, cases)
		t.SkipNow()
	}
}
