package adminapi

import "time"

// Request is an entry of the request log: one call of the rack's API. Entries are in the order in
// which the calls ended, and are written before the caller gets the answer.
type Request struct {
	// Seq counts the entries from 1.
	Seq  int       `json:"seq"`
	Time time.Time `json:"time"`
	// RequestID is the ID in the answer.
	RequestID string `json:"request_id"`
	// Caller is the User-Agent of the request.
	Caller string `json:"caller,omitempty"`
	// Operation is the API's operationId.
	Operation string `json:"operation"`
	Method    string `json:"method"`
	Path      string `json:"path"`
	// Object is the name or ID of the call's object.
	Object   string `json:"object"`
	ObjectID string `json:"object_id"`
	// Status is 0 when the connection was cut.
	Status     int     `json:"status"`
	DurationMS float64 `json:"duration_ms"`
	// Faults are the IDs of the faults that fired.
	Faults []string `json:"faults"`
	// Deferred marks the effect of an earlier request that a fault has already answered.
	Deferred bool `json:"deferred,omitempty"`
}
