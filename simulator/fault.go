package simulator

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Phase is when a fault strikes, seen from the effect of the operation.
type Phase string

// The phases of a fault.
const (
	// Before strikes in front of everything: the request is not even looked at, unless the rule
	// only delays it.
	Before Phase = "before"
	// Instead strikes in place of the effect: the request was read and its caller let in, but
	// nothing is done.
	Instead Phase = "instead"
	// After strikes when the effect is there: it is done, and the caller is told otherwise.
	After Phase = "after"
	// Twice does it twice and answers as the second time says, as a proxy does that repeats; or as
	// the rule says.
	Twice Phase = "twice"
	// Late strikes before the effect, which comes all the same: the rule's Delay after the caller
	// had his answer, or gave up. It needs an Answer, a Cut or a Hang. Server.CarryOut does not
	// wait for the Delay.
	Late Phase = "late"
	// Unwind lets the rack fail in the middle and take back what it began: a create leaves
	// nothing, a delete leaves the disk faulted under another name (A24).
	Unwind Phase = "unwind"
	// Reread strikes when a disk was attached or detached and the rack reads it again for its answer:
	// it is done, and the caller is told that the service is not available (A67).
	Reread Phase = "reread"
)

// Rule makes the rack misbehave on purpose. Which requests it strikes: those of Operation (as the
// API names them; "" is any) that speak of Object (a name or an ID; "" is any) and carry the
// token Bearer ("" is any), after the first Skip of them, Times times (0 is always), each with
// Probability (0 is certainly; the dice are Seed's). What it does to them: Delay and then go on; or
// end them with Answer, a Cut connection, or a Hang that ends in a cut; or give the body slowly (in
// eight pieces with SlowBody before each, or byte for byte with SlowByte), torn after TornBody
// bytes, or without the DropFields of the object or of a page's objects; or spoil the attached
// Device.
type Rule struct {
	Operation   string       `json:"operation,omitempty"`
	Object      string       `json:"object,omitempty"`
	Bearer      string       `json:"bearer,omitempty"`
	Skip        int          `json:"skip,omitempty"`
	Times       int          `json:"times"`
	Probability float64      `json:"probability,omitempty"`
	Seed        uint64       `json:"seed,omitempty"`
	Phase       Phase        `json:"phase,omitempty"`
	Answer      *Answer      `json:"answer,omitempty"`
	Cut         bool         `json:"cut,omitempty"`
	Hang        Duration     `json:"hang,omitempty"`
	Delay       Duration     `json:"delay,omitempty"`
	SlowBody    Duration     `json:"slow_body,omitempty"`
	SlowByte    Duration     `json:"slow_byte,omitempty"`
	TornBody    int          `json:"torn_body,omitempty"`
	DropFields  []string     `json:"drop_fields,omitempty"`
	Device      *DeviceFault `json:"device,omitempty"`
}

// Answer is what the caller gets in place of the rack's own: an error of the rack's form, or a
// raw Body as a proxy in front of the rack would give, behind PadBytes of white space.
type Answer struct {
	Status      int               `json:"status"`
	ErrorCode   string            `json:"error_code,omitempty"`
	Message     string            `json:"message,omitempty"`
	Body        string            `json:"body,omitempty"`
	PadBytes    int               `json:"pad_bytes,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Header      map[string]string `json:"header,omitempty"`
}

// DeviceFault is how an attached disk shows in its guest: never, late, or with another size.
type DeviceFault struct {
	Never     bool     `json:"never,omitempty"`
	Delay     Duration `json:"delay,omitempty"`
	SizeBytes int64    `json:"size_bytes,omitempty"`
}

// Faults are the rules in force. The zero value has none.
type Faults struct {
	mu sync.Mutex
	// mu guards rules, their counters and last.
	rules []*ActiveRule
	last  int
}

// ActiveRule is a rule in force, with how often it matched and how often it struck.
type ActiveRule struct {
	ID string `json:"id"`
	Rule
	Matched int `json:"matched"`
	Fired   int `json:"fired"`

	dice *rand.Rand
}

// firing is one strike of a rule.
type firing struct {
	id string
	Rule
}

// Add puts a rule in force, behind those that are, and returns its ID.
func (f *Faults) Add(r Rule) (id string, err error) {
	if err := r.check(); err != nil {
		return "", err
	}
	if r.Phase == "" {
		r.Phase = Before
		if r.Answer != nil || r.Cut || r.Hang > 0 {
			r.Phase = Instead
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	id = strconv.Itoa(f.last)
	f.rules = append(f.rules, &ActiveRule{ID: id, Rule: r,
		dice: rand.New(rand.NewPCG(r.Seed, r.Seed))})
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
	f.rules = slices.DeleteFunc(f.rules, func(r *ActiveRule) bool { return r.ID == id })
	return len(f.rules) < n
}

// List lists the rules in force.
func (f *Faults) List() []ActiveRule {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]ActiveRule, len(f.rules))
	for i, r := range f.rules {
		list[i] = *r
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
			struck = append(struck, &firing{rule.ID, rule.Rule})
		}
	}
	return struck
}

func (r *ActiveRule) matches(req *request) bool {
	return (r.Operation == "" || r.Operation == req.entry.Operation) &&
		(r.Object == "" || slices.Contains(req.subjects, r.Object)) &&
		(r.Bearer == "" || req.Header.Get("Authorization") == "Bearer "+r.Bearer)
}

func (r *ActiveRule) fires() bool {
	r.Matched++
	if r.Matched <= r.Skip || r.Times > 0 && r.Fired >= r.Times {
		return false
	}
	if r.Probability > 0 && r.dice.Float64() >= r.Probability {
		return false
	}
	r.Fired++
	return true
}

// device is what the rules make of the device that a request attaches.
func (r *request) device(delay Duration) deviceFault {
	f := deviceFault{Delay: time.Duration(delay)}
	for _, fired := range r.faults {
		if d := fired.Device; d != nil {
			f = deviceFault{Never: d.Never, Delay: time.Duration(max(delay, d.Delay)),
				SizeBytes: d.SizeBytes}
		}
	}
	return f
}

// unwinds says that the rack shall fail in the middle of this request.
func (r *request) unwinds() bool { return r.struck(Unwind) }

func (r *request) struck(phase Phase) bool {
	return slices.ContainsFunc(r.faults, func(f *firing) bool { return f.Phase == phase })
}
