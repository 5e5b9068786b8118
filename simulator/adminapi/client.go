// Package adminapi has the wire types of the simulator's admin listener, and a client for it.
//
// Tests and operators observe and disturb a simulated rack through the admin listener, which a real
// rack lacks. [Routes] lists the requests that it answers. GET / answers a browser with the rack's
// page, and other clients with the list of routes. The listener refuses requests from foreign web
// pages: a name in the header Host must be localhost or configured, a header Origin must name the
// listener, and a change that a browser requests needs the token of the rack's page.
//
// The package imports no other package of this module.
package adminapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// Client calls the admin listener at URL. It keeps no connection open, because a test may count the
// simulator's connections.
type Client struct {
	URL string
}

var httpClient = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
}

// Requests returns the entries of the request log whose Seq is greater than since.
func (c Client) Requests(ctx context.Context, since int) ([]Request, error) {
	return get[[]Request](ctx, c, "/requests?since="+strconv.Itoa(since))
}

// ClearRequests empties the request log.
func (c Client) ClearRequests(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/requests", nil, nil)
}

// AddFault adds a fault and returns its ID.
func (c Client) AddFault(ctx context.Context, fault Fault) (string, error) {
	var added struct {
		ID string `json:"id"`
	}
	err := c.call(ctx, http.MethodPost, "/faults", fault, &added)
	return added.ID, err
}

// Faults returns the active faults.
func (c Client) Faults(ctx context.Context) ([]ActiveFault, error) {
	return get[[]ActiveFault](ctx, c, "/faults")
}

// Fired returns the number of times that a fault has fired.
func (c Client) Fired(ctx context.Context, id string) (int, error) {
	faults, err := c.Faults(ctx)
	if err != nil {
		return 0, err
	}
	for _, fault := range faults {
		if fault.ID == id {
			return fault.Fired, nil
		}
	}
	return 0, fmt.Errorf("the rack has no fault %s", id)
}

// RemoveFault removes a fault.
func (c Client) RemoveFault(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/faults/"+id, nil, nil)
}

// ClearFaults removes every fault.
func (c Client) ClearFaults(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/faults", nil, nil)
}

// RunDeferred ends the delays of faults of the phase [Deferred] and of Switches.FreeDelay. It
// returns when the delayed work is done.
func (c Client) RunDeferred(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/deferred", nil, nil)
}

// Reset returns the rack to its start: the objects and switches of its configuration, no faults, no
// mutation and an empty request log. The guests lose their disks.
func (c Client) Reset(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/reset", nil, nil)
}

// Switch changes some of the [Switches], by their JSON names.
func (c Client) Switch(ctx context.Context, switches map[string]any) error {
	return c.call(ctx, http.MethodPatch, "/switches", switches, nil)
}

// Switches returns the current switches.
func (c Client) Switches(ctx context.Context) (Switches, error) {
	return get[Switches](ctx, c, "/switches")
}

// State returns the rack's objects.
func (c Client) State(ctx context.Context) (State, error) {
	return get[State](ctx, c, "/state")
}

// Goroutines returns the stacks of the simulator's goroutines as text.
func (c Client) Goroutines(ctx context.Context) ([]byte, error) {
	return c.send(ctx, http.MethodGet, "/debug/pprof/goroutine?debug=1", nil)
}

func get[T any](ctx context.Context, c Client, path string) (value T, err error) {
	err = c.call(ctx, http.MethodGet, path, nil, &value)
	return value, err
}

func (c Client) call(ctx context.Context, method, path string, body, into any) error {
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return fmt.Errorf("encode for %s: %w", path, err)
		}
	}
	response, err := c.send(ctx, method, path, data)
	if err != nil || into == nil {
		return err
	}
	if err := json.Unmarshal(response, into); err != nil {
		return fmt.Errorf("decode the response to %s %s: %w: %s", method, path, err, response)
	}
	return nil
}

func (c Client) send(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.URL+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("call the admin listener: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := httpClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("call the admin listener: %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", resp.Status, data)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, req.URL, err)
	}
	return data, nil
}

// Route is a request that the admin listener answers.
type Route struct {
	Method string `json:"method"`
	Path   string `json:"path"`
	Does   string `json:"does"`
	// Body is an example of a request body, or "" if the request has none.
	Body string `json:"body,omitempty"`
}

// Routes lists the requests that the admin listener answers, except GET /. A name in braces stands
// for any value.
var Routes = []Route{
	{Method: "GET", Path: "/requests", Does: "the request log; ?since=SEQ: only later entries"},
	{Method: "DELETE", Path: "/requests", Does: "empties the log; the numbering continues"},
	{Method: "GET", Path: "/faults", Does: "the active faults, with how often each fired"},
	{Method: "POST", Path: "/faults", Does: "adds a fault, and answers its id",
		Body: `{"operation": "disk_create", "phase": "after", "times": 1, "cut": true}`},
	{Method: "DELETE", Path: "/faults", Does: "removes all faults"},
	{Method: "DELETE", Path: "/faults/{id}", Does: "removes a fault"},
	{Method: "GET", Path: "/disks/{disk}/faults", Does: "the faults of the disk with that ID; it " +
		"needs --disks=fuse"},
	{Method: "POST", Path: "/disks/{disk}/faults", Does: "makes the disk fail",
		Body: `{"on": ["write", "flush"]}`},
	{Method: "DELETE", Path: "/disks/{disk}/faults", Does: "heals the disk"},
	{Method: "POST", Path: "/deferred", Does: "carries out now what faults of the phase deferred " +
		"and the switch free_delay have delayed; answers when it is done"},
	{Method: "POST", Path: "/reset", Does: "puts the rack back to its start, without faults and " +
		"with an empty log; answers when it is done"},
	{Method: "GET", Path: "/mutations", Does: "the mutations; each breaks a rule of the rack"},
	{Method: "PUT", Path: "/mutations/{name}", Does: "activates a mutation instead of any other"},
	{Method: "DELETE", Path: "/mutations", Does: "ends the active mutation"},
	{Method: "GET", Path: "/switches", Does: "settings of the running rack"},
	{Method: "PATCH", Path: "/switches", Does: "changes the settings that the body names",
		Body: `{"hotplug": "none"}`},
	{Method: "GET", Path: "/state", Does: "disks, instances, snapshots and devices"},
	{Method: "GET", Path: "/metrics", Does: "metrics of the process, for Prometheus"},
	{Method: "GET", Path: "/debug/pprof/goroutine", Does: "the stacks of all goroutines; " +
		"?debug=1: as text"},
}

// Request is an entry of the request log: one call of the rack's API. Entries are in the order in
// which the calls ended. The rack writes an entry before the caller gets the answer.
type Request struct {
	// Seq counts the entries from 1.
	Seq  int       `json:"seq"`
	Time time.Time `json:"time"`
	// RequestID is the answer's X-Request-Id.
	RequestID string `json:"request_id"`
	// Caller is the User-Agent.
	Caller string `json:"caller,omitempty"`
	// Operation is the API's operationId.
	Operation string `json:"operation"`
	Method    string `json:"method"`
	Path      string `json:"path"`
	Object    string `json:"object"`
	ObjectID  string `json:"object_id"`
	// Status is the HTTP status of the answer, or 0 if the connection was cut.
	Status     int      `json:"status"`
	DurationMS float64  `json:"duration_ms"`
	Faults     []string `json:"faults"` // the IDs of the faults that fired
	// Deferred marks a request that the rack carried out after a fault had answered it.
	Deferred bool `json:"deferred,omitempty"`
}

// Mutation is a change that makes the rack break one of its rules.
type Mutation struct {
	Name string `json:"name"`
	// Rule is the ID of the rule that the mutation breaks, or "data" for a promise about data.
	Rule string `json:"rule"`
	Says string `json:"says"`
	// DriverSays is the reason (docs/reasons.md) in the driver's error during the mutation.
	DriverSays string `json:"driver_says,omitempty"`
	Active     bool   `json:"active"`
}

// Mutations lists all mutations.
func (c Client) Mutations(ctx context.Context) ([]Mutation, error) {
	return get[[]Mutation](ctx, c, "/mutations")
}

// Mutate activates a mutation, which replaces the active one.
func (c Client) Mutate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPut, "/mutations/"+name, nil, nil)
}

// Mend ends the active mutation.
func (c Client) Mend(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/mutations", nil, nil)
}

// Phase is the step of a request at which a fault acts.
type Phase string

const (
	// Before is the phase before the rack authenticates the caller. If the fault answers the request,
	// the rack does not carry out the operation.
	Before Phase = "before"
	// Instead is the phase between authentication and operation. The fault may prevent the operation.
	Instead Phase = "instead"
	// After is the phase when the operation has taken effect. The fault may replace the response.
	After Phase = "after"
	// Twice carries out the operation twice, as a proxy with retries does. The caller gets the second
	// response, or the fault's Response.
	Twice Phase = "twice"
	// Deferred answers with the fault's Response, Cut or Hang (one is required). Delay begins when the
	// caller has the response or has gone. The operation follows after Delay or at POST /deferred.
	Deferred Phase = "deferred"
	// Unwind makes the operation fail halfway, and the rack undoes it: a create leaves nothing, a
	// delete leaves the disk faulted under another name (A24), and a finalization leaves the disk in
	// import_ready (A90).
	Unwind Phase = "unwind"
	// Reread makes an attach or a detach fail with 503 after its effect, when the rack reads the disk
	// again for the response (A67).
	Reread Phase = "reread"
)

// Fault injects a failure into the rack.
//
// A fault matches a request of the operationId Operation that names Object (by name or ID) and has
// the token Bearer; an empty field matches every request. The fault ignores the first Skip matches.
// For each later match it fires with the given Probability (0: always), at most Times times (0: no
// limit); Seed seeds the random numbers. A fault does not match a request whose operation an
// earlier fault has prevented.
//
// When a fault fires, it first waits for Delay. Response, Cut and Hang (a wait and then a cut) end
// the request. SlowBody is a pause before each eighth of the body, and SlowByte a pause before each
// byte. TruncateBody cuts the connection after this number of bytes. DropFields removes fields of
// the object, or of each object of a page. Device changes the device of an attached disk.
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

// Response replaces the rack's response. An empty Body means an error in the rack's form, or no
// body if Status is below 300. PadBytes is the number of spaces that are sent before the body.
type Response struct {
	Status      int               `json:"status"`
	ErrorCode   string            `json:"error_code,omitempty"`
	Message     string            `json:"message,omitempty"`
	Body        string            `json:"body,omitempty"`
	PadBytes    int               `json:"pad_bytes,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Header      map[string]string `json:"header,omitempty"`
}

// DeviceFault changes how a guest sees an attached disk: its device never appears, appears after
// Delay, or has another size. If Fails is true, the rack cannot give the disk to the guest, and so
// undoes the attach or the start of the instance. An instance that reboots becomes failed.
type DeviceFault struct {
	Never     bool     `json:"never,omitempty"`
	Delay     Duration `json:"delay,omitempty"`
	SizeBytes Size     `json:"size_bytes,omitempty"`
	Fails     bool     `json:"fails,omitempty"`
}

// ActiveFault is a fault, with the numbers of requests that it matched and for which it fired.
type ActiveFault struct {
	ID string `json:"id"`
	Fault
	Matched int `json:"matched"`
	Fired   int `json:"fired"`
}

// DiskFault affects the operations in On ("read", "write", "flush") of a disk, in every guest. A
// discard counts as a write. Reads and writes are affected in the bytes From up to To (both 0: all
// bytes), and flushes always. Times limits how often the fault takes effect (0: until the disk is
// healed). An affected operation fails with EIO, takes longer (Delay), waits until the disk is
// healed or detached (Hang), or is acknowledged without being done (Lie).
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
	Fired int      `json:"fired,omitempty"`
}

// FailDisk adds a fault to the disk with this ID.
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

// State contains the objects of a rack at one moment.
type State struct {
	Projects    []Project        `json:"projects"`
	Instances   []Instance       `json:"instances"`
	Disks       []Disk           `json:"disks"`
	Snapshots   []SnapshotRecord `json:"snapshots"`
	Images      []Image          `json:"images"`
	Attachments []Attachment     `json:"attachments"`
	LoopDevices []LoopDevice     `json:"loop_devices"`
	Machines    []Machine        `json:"machines,omitempty"`
	// StorageBytes is the part of the quota that disks and snapshots use. Deleted disks and snapshots
	// count until the rack frees them.
	StorageBytes int64 `json:"storage_bytes"`
}

// Machine is an instance's virtual machine. SSH is a local address that QEMU forwards to the
// machine's sshd, and Console has the last bytes of the machine's serial console.
type Machine struct {
	InstanceID string `json:"instance_id"`
	SSH        string `json:"ssh"`
	Console    string `json:"console"`
}

// Attachment is a disk that is attached to an instance.
type Attachment struct {
	InstanceID string `json:"instance_id"`
	DiskID     string `json:"disk_id"`
}

// LoopDevice is the loop device through which a guest sees a disk.
type LoopDevice struct {
	Path        string `json:"path"`
	Serial      string `json:"serial"`
	BackingFile string `json:"backing_file"`
}
