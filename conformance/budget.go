package conformance

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

type amount struct {
	objects int
	gib     int64
}

func (a amount) String() string {
	return fmt.Sprintf("%d disks and snapshots of %d GiB", a.objects, a.gib)
}

const (
	partRules = "rules"
	partData  = "data"
)

var partNames = []string{partRules, "ext4", "xfs", "btrfs", "block", partData}

var parts = map[string]struct {
	// need is the peak of objects and GiB while the part runs on the simulator; a test compares it
	// with a run's. The rule checks keep the objects that they share until the end of the run.
	need amount
	// requests is the number of the part's requests to the rack. own is the time that the part takes
	// on a simulated rack, which answers almost at once.
	requests int
	own      time.Duration
	// tools are the programs that the part needs on this machine.
	tools []string
}{
	partRules: {amount{14, 14}, 1250, 7 * time.Second, nil},
	"ext4": {amount{14, 14}, 540, 2 * time.Second,
		[]string{"mke2fs", "e2fsck", "resize2fs", "blkid"}},
	"xfs":    {amount{14, 14}, 540, 2 * time.Second, []string{"mkfs.xfs", "blkid"}},
	"btrfs":  {amount{14, 14}, 540, 2 * time.Second, []string{"mkfs.btrfs", "btrfs", "blkid"}},
	"block":  {amount{14, 14}, 540, 2 * time.Second, []string{"blkid"}},
	partData: {amount{9, 18}, 780, 55 * time.Second, nil},
}

// optional is how many GiB partData can lack: the run then leaves out its largest checks.
const optional = 8

// needOf returns the most that the selected parts need at one time, plus the disk that describes
// the run.
func needOf(selected []string) amount {
	var most amount
	for _, part := range selected {
		need := parts[part].need
		most.objects, most.gib = max(most.objects, need.objects), max(most.gib, need.gib)
	}
	return amount{most.objects + 1, most.gib + 1}
}

// leastOf returns what the selected parts need at one time without the largest checks of data.
func leastOf(selected []string) amount {
	least := needOf(slices.DeleteFunc(slices.Clone(selected), func(part string) bool {
		return part == partData
	}))
	if slices.Contains(selected, partData) {
		need := parts[partData].need
		least.objects = max(least.objects, need.objects+1)
		least.gib = max(least.gib, need.gib+1-optional)
	}
	return least
}

type budget struct {
	limit amount

	mu sync.Mutex
	// mu guards the fields below: the objects that exist or are being created, the IDs of deleted
	// objects, and the peak.
	objects []*object
	gone    map[string]bool
	most    amount
}

// object is a disk or snapshot of the run. A request deletes it by its ID or by its name.
type object struct {
	id   string // "" while the object is being created
	name string // "" if the driver chose it
	gib  int64
}

func newBudget(limit amount) *budget { return &budget{limit: limit, gone: map[string]bool{}} }

// begin reserves room for objects. After the creation the caller calls end: made is true if the
// rack created the objects, and ids has the IDs that the rack returned.
func (b *budget) begin(objects ...*object) (end func(made bool, ids ...string), err error) {
	asked := sum(objects)
	b.mu.Lock()
	defer b.mu.Unlock()
	now := sum(b.objects)
	if asked.objects > 0 && (now.objects+asked.objects > b.limit.objects ||
		now.gib+asked.gib > b.limit.gib) {
		return nil, fmt.Errorf("the budget is %s, and the run has %s: %s more are not made; raise "+
			"--budget, or leave parts out with --only", b.limit, now, asked)
	}
	b.objects = append(b.objects, objects...)
	now = sum(b.objects)
	b.most.objects, b.most.gib = max(b.most.objects, now.objects), max(b.most.gib, now.gib)
	return func(made bool, ids ...string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for i, id := range ids {
			objects[i].id = id
		}
		b.objects = slices.DeleteFunc(b.objects, func(o *object) bool {
			return slices.Contains(objects, o) && (!made || b.gone[o.id])
		})
	}, nil
}

// deleted releases the room of the object that was deleted by this ID or name. It remembers the ID,
// because the answer to the object's creation may come later.
func (b *budget) deleted(idOrName string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if isUUID(idOrName) {
		b.gone[idOrName] = true
	}
	b.objects = slices.DeleteFunc(b.objects, func(o *object) bool {
		return idOrName != "" && (o.id == idOrName || o.name == idOrName)
	})
}

// identify sets the ID of the object with this name if it has none. It calls id without the lock,
// because id may wait for the rack's answer.
func (b *budget) identify(name string, id func() string) {
	b.mu.Lock()
	i := slices.IndexFunc(b.objects, func(o *object) bool { return o.id == "" && o.name == name })
	b.mu.Unlock()
	if i < 0 {
		return
	}
	known := id()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range b.objects {
		if o.id == "" && o.name == name {
			o.id = known
		}
	}
}

func sum(objects []*object) amount {
	all := amount{objects: len(objects)}
	for _, o := range objects {
		all.gib += o.gib
	}
	return all
}

func (b *budget) held() (now, most amount) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return sum(b.objects), b.most
}

func estimate(selected []string, latency time.Duration) time.Duration {
	var all time.Duration
	for _, part := range selected {
		all += parts[part].own + time.Duration(parts[part].requests)*latency
	}
	return all
}

type progress struct {
	out     io.Writer
	latency time.Duration
	began   time.Time
	// expected is the estimate for the whole run. spent is the estimate for the parts that are done.
	expected, spent time.Duration
	// part is the part that runs now. partDone of its partAll checks or specs are done.
	part              string
	partDone, partAll int
}

func (p *progress) enter(part string, all int) {
	p.leave()
	p.part, p.partDone, p.partAll = part, 0, all
	fmt.Fprintf(p.out, "\n%s\n", part)
}

func (p *progress) leave() {
	if p.part != "" {
		p.spent += estimate([]string{p.part}, p.latency)
	}
	p.part = ""
}

func (p *progress) done(status, name, reason string) {
	p.partDone++
	line := fmt.Sprintf("  %3d/%-3d  %-14s %s", p.partDone, p.partAll, status, name)
	if runes := []rune(line); len(runes) > 120 {
		line = string(runes[:119]) + "…"
	}
	fmt.Fprintf(p.out, "%s  [%s left]\n", line, round(p.left()))
	if reason != "" {
		fmt.Fprintf(p.out, "                          %s\n", reason)
	}
}

// left estimates the remaining time: the estimate of what is left to do, multiplied by how much
// slower or faster than estimated the run was so far.
func (p *progress) left() time.Duration {
	behind := p.spent
	if p.partAll > 0 {
		behind += time.Duration(float64(estimate([]string{p.part}, p.latency)) *
			float64(p.partDone) / float64(p.partAll))
	}
	left := p.expected - behind
	if behind < time.Second {
		return left
	}
	return max(0, time.Duration(float64(left)*float64(time.Since(p.began))/float64(behind)))
}

func round(d time.Duration) string {
	if d < time.Minute {
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%d min", int((d + 30*time.Second).Minutes()))
}
