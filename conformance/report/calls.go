package report

import (
	"math"
	"slices"
)

// maxSamples is how many latencies of an operation a report keeps.
const maxSamples = 1000

// Calls are the latencies of one operation. [NewCalls] takes samples in any order and number.
type Calls struct {
	Kind      Kind   `json:"kind"`
	Operation string `json:"operation"`
	// Count is the number of calls, Failed that of calls which were answered with an error.
	Count  int `json:"count"`
	Failed int `json:"failed"`
	// Milliseconds are the latencies in milliseconds, sorted: of all calls, or 1000 evenly spaced
	// ones, the quickest and the slowest included, if there were more.
	Milliseconds []float64 `json:"milliseconds"`
}

// NewCalls returns the latencies of an operation; the samples are in milliseconds.
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
// exceed: a sample, by nearest rank. It returns 0 if there is none.
func (c Calls) Quantile(q float64) float64 {
	if len(c.Milliseconds) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(c.Milliseconds))))
	return c.Milliseconds[min(max(rank, 1), len(c.Milliseconds))-1]
}
