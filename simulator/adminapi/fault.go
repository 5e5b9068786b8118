package adminapi

import (
	"context"
	"net/http"
)

// Phase is the time at which a fault acts, relative to the effect of the operation.
type Phase string

// These are the phases of a fault.
const (
	// Before acts first. Unless the fault only delays the request, the request has no effect, and its
	// caller is not authenticated.
	Before Phase = "before"
	// Instead replaces the effect: the request was read and its caller authenticated, but the
	// operation is not carried out.
	Instead Phase = "instead"
	// After acts when the operation has taken effect. The caller gets another response.
	After Phase = "after"
	// Twice repeats the operation, as a proxy with retries does. The caller gets the second
	// response, or the fault's.
	Twice Phase = "twice"
	// Deferred responds first and carries the operation out later. The fault's Delay begins when the
	// caller has the response or gives up, and POST /deferred ends it. The fault needs a Response, a
	// Cut or a Hang.
	Deferred Phase = "deferred"
	// Unwind makes the rack fail halfway and undo the operation: a create leaves nothing, a delete
	// leaves the disk faulted under another name (A24), and a finalization leaves it import_ready
	// (A90).
	Unwind Phase = "unwind"
	// Reread makes the rack fail when it has attached or detached a disk and reads the disk again for
	// its response: the operation has taken effect, and the caller gets 503 (A67).
	Reread Phase = "reread"
)

// Fault injects a failure into the rack.
//
// It matches the requests of Operation (an operationId) that name Object (a name or an ID) and
// carry the token Bearer; an empty field matches everything. It skips the first Skip of them, and
// then fires Times times (0 means always), each time with Probability (0 means always; Seed seeds
// the random numbers). A request that another fault ends before this fault's phase does not count.
//
// When it fires, it waits for Delay. Then it lets the request continue, or ends it with Response,
// with a Cut connection, or with a Hang that ends in a cut. Other fields change the response: it
// is sent slowly (in eight pieces with SlowBody before each, or byte by byte with SlowByte before
// each), cut off after TruncateBody bytes, or sent without DropFields in the object or in the
// objects of a page. Device changes the device of an attached disk.
type Fault struct {
	Operation    string       `json:"operation,omitempty"`
	Object       string       `json:"object,omitempty"`
	Bearer       string       `json:"bearer,omitempty"`
	Skip         int          `json:"skip,omitempty"`
	Times        int          `json:"times"`
	Probability  float64      `json:"probability,omitempty"`
	Seed         uint64       `json:"seed,omitempty"`
	Phase        Phase        `json:"phase,omitempty"`
	Response     *Response    `json:"response,omitempty"`
	Cut          bool         `json:"cut,omitempty"`
	Hang         Duration     `json:"hang,omitempty"`
	Delay        Duration     `json:"delay,omitempty"`
	SlowBody     Duration     `json:"slow_body,omitempty"`
	SlowByte     Duration     `json:"slow_byte,omitempty"`
	TruncateBody int          `json:"truncate_body,omitempty"`
	DropFields   []string     `json:"drop_fields,omitempty"`
	Device       *DeviceFault `json:"device,omitempty"`
}

// Response replaces the rack's own response: with an error in the rack's form, or with a raw Body
// as a proxy in front of the rack would send, after PadBytes of white space.
type Response struct {
	Status      int               `json:"status"`
	ErrorCode   string            `json:"error_code,omitempty"`
	Message     string            `json:"message,omitempty"`
	Body        string            `json:"body,omitempty"`
	PadBytes    int               `json:"pad_bytes,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Header      map[string]string `json:"header,omitempty"`
}

// DeviceFault changes the device of an attached disk in its guest: it never appears, appears
// after a delay, or has another size. With Fails the rack cannot give the disk to the guest: an
// attach or a start is then undone, and an instance that reboots becomes failed.
type DeviceFault struct {
	Never     bool     `json:"never,omitempty"`
	Delay     Duration `json:"delay,omitempty"`
	SizeBytes Size     `json:"size_bytes,omitempty"`
	Fails     bool     `json:"fails,omitempty"`
}

// ActiveFault is an active fault, with the number of requests that it matched and the number of
// times that it fired.
type ActiveFault struct {
	ID string `json:"id"`
	Fault
	Matched int `json:"matched"`
	Fired   int `json:"fired"`
}

// DiskFault makes a disk fail, in every guest to which it is attached. On lists the operations
// that fail ("read", "write", "flush"). The fault applies to the bytes From up to To; both 0
// means all bytes, and a flush has no bytes. It applies Times times; 0 means until the disk is
// healed. An operation that it applies to fails with EIO, takes Delay longer, Hangs until the
// disk is healed or detached, or is acknowledged but not done (Lie). A discard counts as a write.
//
// The rack needs disks that can fail: oxide-simulator serve --disks=fuse.
type DiskFault struct {
	On    []string `json:"on"`
	From  Size     `json:"from,omitempty"`
	To    Size     `json:"to,omitempty"`
	Times int      `json:"times,omitempty"`
	Delay Duration `json:"delay,omitempty"`
	Hang  bool     `json:"hang,omitempty"`
	Lie   bool     `json:"lie,omitempty"`
	// Fired is the number of times that the fault has applied.
	Fired int `json:"fired,omitempty"`
}

// FailDisk adds a fault to the disk with that ID.
func (c Client) FailDisk(ctx context.Context, id string, fault DiskFault) error {
	return c.call(ctx, http.MethodPost, "/disks/"+id+"/faults", fault, nil)
}

// HealDisk removes all faults of a disk.
func (c Client) HealDisk(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/disks/"+id+"/faults", nil, nil)
}

// DiskFaults lists the faults of a disk.
func (c Client) DiskFaults(ctx context.Context, id string) ([]DiskFault, error) {
	return get[[]DiskFault](ctx, c, "/disks/"+id+"/faults")
}
