package sanity

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

// Admin talks to a simulator's admin listener.
type Admin struct {
	// URL is the listener's.
	URL string
}

// Request is an entry of the rack's request log.
type Request struct {
	Seq        int       `json:"seq"`
	Time       time.Time `json:"time"`
	Operation  string    `json:"operation"`
	Method     string    `json:"method"`
	Path       string    `json:"path"`
	Object     string    `json:"object"`
	ObjectID   string    `json:"object_id"`
	Status     int       `json:"status"`
	DurationMS float64   `json:"duration_ms"`
	Faults     []string  `json:"faults"`
	Late       bool      `json:"late"`
}

// Fault is a rule by which the rack misbehaves. See the simulator's documentation for what the
// fields mean together; the zero value of a field does not restrict or change anything. The phases
// are before, after, instead, twice, late, unwind and reread.
type Fault struct {
	Operation   string       `json:"operation,omitempty"`
	Object      string       `json:"object,omitempty"`
	Bearer      string       `json:"bearer,omitempty"`
	Skip        int          `json:"skip,omitempty"`
	Times       int          `json:"times"` // 0 = always
	Probability float64      `json:"probability,omitempty"`
	Seed        uint64       `json:"seed,omitempty"`
	Phase       string       `json:"phase,omitempty"`
	Answer      *FaultAnswer `json:"answer,omitempty"`
	Cut         bool         `json:"cut,omitempty"`
	Hang        string       `json:"hang,omitempty"`
	Delay       string       `json:"delay,omitempty"`
	SlowBody    string       `json:"slow_body,omitempty"`
	SlowByte    string       `json:"slow_byte,omitempty"`
	TornBody    int          `json:"torn_body,omitempty"`
	DropFields  []string     `json:"drop_fields,omitempty"`
	Device      *FaultDevice `json:"device,omitempty"`
}

// FaultAnswer is what the caller gets in place of the rack's own answer.
type FaultAnswer struct {
	Status      int               `json:"status"`
	ErrorCode   string            `json:"error_code,omitempty"`
	Message     string            `json:"message,omitempty"`
	Body        string            `json:"body,omitempty"`
	PadBytes    int               `json:"pad_bytes,omitempty"`
	ContentType string            `json:"content_type,omitempty"`
	Header      map[string]string `json:"header,omitempty"`
}

// FaultDevice is how an attached disk appears in its guest, or does not.
type FaultDevice struct {
	Never     bool   `json:"never,omitempty"`
	Delay     string `json:"delay,omitempty"`
	SizeBytes int64  `json:"size_bytes,omitempty"`
}

// Requests reads the rack's request log after the entry since; 0 reads all.
func (a Admin) Requests(ctx context.Context, since int) ([]Request, error) {
	var requests []Request
	err := a.call(ctx, http.MethodGet, "/requests?since="+strconv.Itoa(since), nil, &requests)
	return requests, err
}

// ForgetRequests empties the request log.
func (a Admin) ForgetRequests(ctx context.Context) error {
	return a.call(ctx, http.MethodDelete, "/requests", nil, nil)
}

// AddFault adds a rule and returns its ID.
func (a Admin) AddFault(ctx context.Context, fault Fault) (string, error) {
	var added struct {
		ID string `json:"id"`
	}
	err := a.call(ctx, http.MethodPost, "/faults", fault, &added)
	return added.ID, err
}

// Fired says how often a rule has struck.
func (a Admin) Fired(ctx context.Context, id string) (int, error) {
	var rules []struct {
		ID    string `json:"id"`
		Fired int    `json:"fired"`
	}
	if err := a.call(ctx, http.MethodGet, "/faults", nil, &rules); err != nil {
		return 0, err
	}
	for _, rule := range rules {
		if rule.ID == id {
			return rule.Fired, nil
		}
	}
	return 0, fmt.Errorf("the rack has no fault %s", id)
}

// CarryOut carries out now what faults of the phase late hold back, frees what was deleted, and
// waits until it is done.
func (a Admin) CarryOut(ctx context.Context) error {
	return a.call(ctx, http.MethodPost, "/late", nil, nil)
}

// ClearFaults removes every rule.
func (a Admin) ClearFaults(ctx context.Context) error {
	return a.call(ctx, http.MethodDelete, "/faults", nil, nil)
}

// Switch changes switches of the running rack: hotplug (bool), device_delay, create_hold,
// snapshot_hold, free_delay, instance_delay (durations as "1s"), quota_bytes, disk_limit.
func (a Admin) Switch(ctx context.Context, switches map[string]any) error {
	return a.call(ctx, http.MethodPatch, "/switches", switches, nil)
}

// State reads all that the rack has, as the simulator's documentation describes it.
func (a Admin) State(ctx context.Context, into any) error {
	return a.call(ctx, http.MethodGet, "/state", nil, into)
}

// Goroutines lists what the simulator's goroutines do.
func (a Admin) Goroutines(ctx context.Context) ([]string, error) {
	return goroutines(ctx, adminClient, a.URL)
}

// adminClient keeps no connection, so that the ledger does not count the harness's own.
var adminClient = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
}

func (a Admin) call(ctx context.Context, method, path string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode for %s: %w", path, err)
	}
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.URL+path, reader)
	if err != nil {
		return fmt.Errorf("ask the rack's admin listener: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	answer, err := fetch(adminClient, req)
	if err != nil {
		return fmt.Errorf("ask the rack's admin listener: %w", err)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("the admin listener's answer to %s %s: %w: %s", method, path, err, answer)
	}
	return nil
}

// fetch sends a request and reads the whole answer, which must be a success.
func fetch(client *http.Client, req *http.Request) ([]byte, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL, err)
	}
	if resp.StatusCode/100 != 2 {
		return nil, fmt.Errorf("%s %s: %s: %s", req.Method, req.URL, resp.Status, body)
	}
	return body, nil
}
