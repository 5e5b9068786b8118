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

// parts are the parts of a run, in the order in which they run.
var parts = []string{partRules, "ext4", "xfs", "btrfs", "block", partData}

const (
	partRules = "rules"
	partData  = "data"
)

// need is the most that each part has on the simulator at one time. A test compares it with what
// the parts took. The objects that the checks of the rules share exist until the end of the run.
var need = map[string]amount{
	partRules: {14, 14},
	"ext4":    {14, 14}, "xfs": {14, 14}, "btrfs": {14, 14}, "block": {14, 14},
	partData: {9, 18},
}

// needOf returns the most that the selected parts need at one time, and adds the disk that marks
// the run.
func needOf(selected []string) amount {
	var most amount
	for _, part := range selected {
		most.objects = max(most.objects, need[part].objects)
		most.gib = max(most.gib, need[part].gib)
	}
	return amount{most.objects + 1, most.gib + 1}
}

// budget limits the objects that a run has at one time.
type budget struct {
	limit amount

	mu sync.Mutex
	// mu guards the fields below: the sizes of the existing objects by ID or name, the objects that
	// are being created, and the peak.
	sizes   map[string]int64
	pending amount
	most    amount
}

func newBudget(limit amount) *budget { return &budget{limit: limit, sizes: map[string]int64{}} }

// begin reserves room for objects of these sizes in GiB. The caller ends the creation with an ID
// or a name for each object, in the same order. An object without an ID, or with "", was not
// created.
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

// gone releases the room of an object that no longer exists.
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

// peak returns the most that existed at one time.
func (b *budget) peak() amount {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most
}
