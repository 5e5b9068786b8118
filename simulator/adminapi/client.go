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

// Client calls the admin listener at URL. It keeps no connection open, so that it does not affect
// a count of the simulator's connections.
type Client struct {
	URL string
}

var httpClient = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
}

// Requests returns the entries of the request log after the entry since; 0 returns all of them.
func (c Client) Requests(ctx context.Context, since int) ([]Request, error) {
	var requests []Request
	err := c.call(ctx, http.MethodGet, "/requests?since="+strconv.Itoa(since), nil, &requests)
	return requests, err
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
	var faults []ActiveFault
	err := c.call(ctx, http.MethodGet, "/faults", nil, &faults)
	return faults, err
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

// RunDeferred carries out at once the work that faults of the phase [Deferred] and
// Switches.FreeDelay have delayed, and waits until it is done.
func (c Client) RunDeferred(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/deferred", nil, nil)
}

// Reset puts the rack back to its start: the objects and switches that it was started with, no
// fault, no mutation and no request in the log. The guests lose their disks.
func (c Client) Reset(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, "/reset", nil, nil)
}

// Switch changes some of the [Switches], by their JSON names.
func (c Client) Switch(ctx context.Context, switches map[string]any) error {
	return c.call(ctx, http.MethodPatch, "/switches", switches, nil)
}

// Switches returns the present switches.
func (c Client) Switches(ctx context.Context) (Switches, error) {
	var switches Switches
	err := c.call(ctx, http.MethodGet, "/switches", nil, &switches)
	return switches, err
}

// State returns everything that the rack has.
func (c Client) State(ctx context.Context) (State, error) {
	var state State
	err := c.call(ctx, http.MethodGet, "/state", nil, &state)
	return state, err
}

// Goroutines returns the stacks of the simulator's goroutines as text.
func (c Client) Goroutines(ctx context.Context) ([]byte, error) {
	return c.send(ctx, http.MethodGet, "/debug/pprof/goroutine?debug=1", nil)
}

// call sends body as JSON unless it is nil, and decodes the response into a value unless that is
// nil.
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

// send reads the whole response, and returns an error unless it is a success.
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
