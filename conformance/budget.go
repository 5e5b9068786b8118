package conformance

import (
	"fmt"
	"sync"
)

// amount is a number of disks and snapshots, and their size.
type amount struct {
	objects int
	gib     int64
}

func (a amount) String() string {
	return fmt.Sprintf("%d disks and snapshots of %d GiB", a.objects, a.gib)
}

// parts of a run, in their order.
var parts = []string{partRules, "ext4", "xfs", "btrfs", "block", partData}

const (
	partRules = "rules"
	partData  = "data"
)

// need is what the parts have at one time on the simulator, where a test compares it with what they
// took. What the checks of rules share is there until the end of the run.
var need = map[string]amount{
	partRules: {14, 14},
	"ext4":    {14, 14}, "xfs": {14, 14}, "btrfs": {14, 14}, "block": {14, 14},
	partData: {9, 18},
}

// needOf is what the parts need at one time. The disk that marks the run is added.
func needOf(selected []string) amount {
	var most amount
	for _, part := range selected {
		most.objects = max(most.objects, need[part].objects)
		most.gib = max(most.gib, need[part].gib)
	}
	return amount{most.objects + 1, most.gib + 1}
}

// budget bounds what exists of a run at one time.
type budget struct {
	limit amount

	mu sync.Mutex
	// mu guards the rest: what exists by ID or name, what is being created, and the most there was.
	sizes   map[string]int64
	pending amount
	most    amount
}

func newBudget(limit amount) *budget { return &budget{limit: limit, sizes: map[string]int64{}} }

// begin asks for room for objects of these sizes in GiB. The caller ends the creation with an ID or
// a name for each, in their order; without any, or with "", nothing was made.
func (b *budget) begin(gib ...int64) (end func(ids ...string), err error) {
	asked := amount{objects: len(gib)}
	for _, g := range gib {
		asked.gib += g
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	if asked.objects > 0 && (now.objects+asked.objects > b.limit.objects ||
		now.gib+asked.gib > b.limit.gib) {
		return nil, fmt.Errorf("the budget is %s, and the run has %s: %s more are not made; raise "+
			"--budget, or leave parts out with --only", b.limit, now, asked)
	}
	b.pending.objects += asked.objects
	b.pending.gib += asked.gib
	b.note()
	return func(ids ...string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.pending.objects -= asked.objects
		b.pending.gib -= asked.gib
		for i, id := range ids {
			if id != "" {
				b.sizes[id] = gib[i]
			}
		}
	}, nil
}

// gone takes note of an object that does not exist any more.
func (b *budget) gone(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.sizes, id)
}

func (b *budget) now() amount {
	now := b.pending
	for _, gib := range b.sizes {
		now.objects++
		now.gib += gib
	}
	return now
}

func (b *budget) note() {
	now := b.now()
	b.most.objects, b.most.gib = max(b.most.objects, now.objects), max(b.most.gib, now.gib)
}

// peak is the most there was at one time.
func (b *budget) peak() amount {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most
}
