package simulator

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Faults are the rules in force. The zero value has none.
type Faults struct {
	mu sync.Mutex
	// mu guards rules, their counters and last.
	rules []*activeFault
	last  int
}

// activeFault is a fault in force, with its own random numbers.
type activeFault struct {
	adminapi.ActiveFault
	random *rand.Rand
}

// firing is one time that a fault fires.
type firing struct {
	id string
	adminapi.Fault
}

// Add puts a rule in force, behind those that are, and returns its ID.
func (f *Faults) Add(r adminapi.Fault) (id string, err error) {
	if err := checkFault(r); err != nil {
		return "", err
	}
	if r.Phase == "" {
		r.Phase = adminapi.Before
		if r.Response != nil || r.Cut || r.Hang > 0 {
			r.Phase = adminapi.Instead
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	id = strconv.Itoa(f.last)
	f.rules = append(f.rules, &activeFault{adminapi.ActiveFault{ID: id, Fault: r},
		rand.New(rand.NewPCG(r.Seed, r.Seed))})
	return id, nil
}

// Clear removes every rule.
func (f *Faults) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
}

// Remove removes one rule and says whether it was there.
func (f *Faults) Remove(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.rules)
	f.rules = slices.DeleteFunc(f.rules, func(r *activeFault) bool { return r.ID == id })
	return len(f.rules) < n
}

// List lists the rules in force.
func (f *Faults) List() []adminapi.ActiveFault {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]adminapi.ActiveFault, len(f.rules))
	for i, r := range f.rules {
		list[i] = r.ActiveFault
	}
	return list
}

func (f *Faults) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.rules) == 0
}

// strike finds the rules that strike a request, in the order in which they were added.
func (f *Faults) strike(r *request) []*firing {
	f.mu.Lock()
	defer f.mu.Unlock()
	var struck []*firing
	for _, rule := range f.rules {
		if rule.matches(r) && rule.fires() {
			struck = append(struck, &firing{rule.ID, rule.Fault})
		}
	}
	return struck
}

func (r *activeFault) matches(req *request) bool {
	return (r.Operation == "" || r.Operation == req.entry.Operation) &&
		(r.Object == "" || slices.Contains(req.subjects, r.Object)) &&
		(r.Bearer == "" || req.Header.Get("Authorization") == "Bearer "+r.Bearer)
}

func (r *activeFault) fires() bool {
	r.Matched++
	if r.Matched <= r.Skip || r.Times > 0 && r.Fired >= r.Times {
		return false
	}
	if r.Probability > 0 && r.random.Float64() >= r.Probability {
		return false
	}
	r.Fired++
	return true
}
