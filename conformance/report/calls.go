package report

import (
	"math"
	"slices"
)

// maxSamples is the number of latencies of an operation that a report keeps.
const maxSamples = 1000

// Calls has the latencies of one operation. [NewCalls] accepts samples in any order and number.
type Calls struct {
	Kind      Kind   `json:"kind"`
	Operation string `json:"operation"`
	// Count is the number of calls. Failed is the number of calls that were answered with an error.
	Count  int `json:"count"`
	Failed int `json:"failed"`
	// Milliseconds are the latencies in milliseconds, sorted. If there were more than 1000 calls, it
	// has 1000 evenly spaced latencies, including the shortest and the longest.
	Milliseconds []float64 `json:"milliseconds"`
}

// NewCalls returns the latencies of an operation from samples in milliseconds.
func NewCalls(kind Kind, operation string, failed int, milliseconds []float64) Calls {
	sorted := slices.Sorted(slices.Values(milliseconds))
	calls := Calls{Kind: kind, Operation: operation, Count: len(sorted), Failed: failed,
		Milliseconds: sorted}
	if len(sorted) > maxSamples {
		calls.Milliseconds = make([]float64, maxSamples)
		for i := range maxSamples {
			calls.Milliseconds[i] = sorted[i*(len(sorted)-1)/(maxSamples-1)]
		}
	}
	return calls
}

// Quantile returns the latency in milliseconds that the share q (0 to 1) of the calls did not
// exceed. The result is a sample, chosen by nearest rank, or 0 if there is none.
func (c Calls) Quantile(q float64) float64 {
	if len(c.Milliseconds) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(c.Milliseconds))))
	return c.Milliseconds[min(max(rank, 1), len(c.Milliseconds))-1]
}
