package simulator

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Faults are the active faults. The zero value has none.
type Faults struct {
	mu sync.Mutex
	// mu guards active, the counters of the faults, and last.
	active []*activeFault
	last   int
}

// activeFault is an active fault with its own random numbers.
type activeFault struct {
	adminapi.ActiveFault
	random *rand.Rand
}

// spent reports whether the fault has fired as often as it may.
func (f *activeFault) spent() bool { return f.Times > 0 && f.Fired >= f.Times }

// firing is a fault that fires for a request.
type firing struct {
	id string
	adminapi.Fault
}

// Add adds a fault behind the active ones, and returns its ID.
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
	live := slices.DeleteFunc(slices.Clone(f.active), (*activeFault).spent)
	if err := checkCount(len(live), "/faults"); err != nil {
		return "", err
	}
	if len(f.active) >= 2*maxFaults {
		f.active = live
	}
	f.last++
	id = strconv.Itoa(f.last)
	f.active = append(f.active, &activeFault{adminapi.ActiveFault{ID: id, Fault: r},
		rand.New(rand.NewPCG(r.Seed, r.Seed))})
	return id, nil
}

// Clear removes every fault.
func (f *Faults) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = nil
}

// Remove removes a fault and reports whether it existed.
func (f *Faults) Remove(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.active)
	f.active = slices.DeleteFunc(f.active, func(r *activeFault) bool { return r.ID == id })
	return len(f.active) < n
}

// List returns the active faults.
func (f *Faults) List() []adminapi.ActiveFault {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]adminapi.ActiveFault, len(f.active))
	for i, r := range f.active {
		list[i] = r.ActiveFault
	}
	return list
}

func (f *Faults) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.active) == 0
}

// match returns the faults that fire for a request: in the order of their phases, and of one phase
// in the order in which they were added. If a fault ends the request before its effect, the faults
// behind it do not fire: they wait for the next request.
func (f *Faults) match(r *apiRequest) []*firing {
	f.mu.Lock()
	defer f.mu.Unlock()
	var fired []*firing
	for _, phase := range phases {
		for _, fault := range f.active {
			if fault.Phase != phase || !fault.matches(r) || !fault.fires() {
				continue
			}
			fired = append(fired, &firing{fault.ID, fault.Fault})
			early := phase == adminapi.Before || phase == adminapi.Instead
			if early && ends(fault.Fault) {
				return fired
			}
		}
	}
	return fired
}

func (r *activeFault) matches(req *apiRequest) bool {
	return (r.Operation == "" || r.Operation == req.entry.Operation) &&
		(r.Object == "" || slices.Contains(req.subjects, r.Object)) &&
		(r.Bearer == "" || bearerOf(req.Request) == r.Bearer)
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
