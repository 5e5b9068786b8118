package adminapi

// Phase is when a fault acts, relative to the effect of the operation.
type Phase string

// The phases of a fault.
const (
	// Before acts ahead of everything: the request is not even read, unless the fault only delays
	// it.
	Before Phase = "before"
	// Instead replaces the effect: the request was read and its caller authenticated, but nothing
	// is done.
	Instead Phase = "instead"
	// After acts when the operation is done: its effect is there, and the caller gets another
	// response.
	After Phase = "after"
	// Twice repeats the operation, as a proxy with retries does. The caller gets the second
	// response, or the fault's.
	Twice Phase = "twice"
	// Deferred responds first and carries the operation out afterwards: the fault's Delay after the
	// caller had the response or gave up. It needs a Response, a Cut or a Hang. POST /deferred
	// skips the Delay.
	Deferred Phase = "deferred"
	// Unwind lets the rack fail halfway and undo what it began: a create leaves nothing, a delete
	// leaves the disk faulted under another name (A24).
	Unwind Phase = "unwind"
	// Reread acts when a disk was attached or detached and the rack reads it again for its response:
	// the effect is there, and the caller gets 503 (A67).
	Reread Phase = "reread"
)

// Fault injects a failure into the rack.
//
// It matches the requests of Operation (an operationId; "" is any) that name Object (a name or an
// ID; "" is any) and carry the token Bearer ("" is any). It fires for those after the first Skip,
// Times times (0 is always), each with Probability (0 is always; Seed seeds the random numbers).
//
// When it fires, it waits for Delay and then goes on, or ends the request with Response, with a Cut
// connection, or with a Hang that ends in a cut. Or it changes how the response is sent: slowly (in
// eight pieces with SlowBody before each, or byte by byte with SlowByte before each), cut off after
// TruncateBody bytes, or without DropFields in the object or in the objects of a page. Or it spoils
// the attached Device.
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

// Response replaces the rack's own: an error in the rack's form, or a raw Body as a proxy in front
// of the rack would send, after PadBytes of white space.
type Response struct {
	Status      int               `json:"status"`
	ErrorCode   string            `json:"error_code,omitempty"`
	Message     string            `json:"message,omitempty"`
	Body        string            `json:"body,omitempty"`
	PadBytes    int               `json:"pad_bytes,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Header      map[string]string `json:"header,omitempty"`
}

// DeviceFault changes how an attached disk appears in its guest: never, after a delay, or with
// another size. Or the rack Fails to give the disk to the guest: an attach or a start is then
// undone, and an instance that reboots becomes failed.
type DeviceFault struct {
	Never     bool     `json:"never,omitempty"`
	Delay     Duration `json:"delay,omitempty"`
	SizeBytes int64    `json:"size_bytes,omitempty"`
	Fails     bool     `json:"fails,omitempty"`
}

// ActiveFault is a fault in force, with how often it matched a request and how often it fired.
type ActiveFault struct {
	ID string `json:"id"`
	Fault
	Matched int `json:"matched"`
	Fired   int `json:"fired"`
}
