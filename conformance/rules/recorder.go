package rules

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// RecordedCall is one request to the rack and its answer.
type RecordedCall struct {
	// Operation is the API's operationId, or "" for an unknown path.
	Operation    string
	Method, Path string
	// Status is 0 when there was no answer.
	Status    int
	ErrorCode string
	RequestID string
	Began     time.Time
	Took      time.Duration
	// Answer is the beginning of the answer's body.
	Answer string

	// repeated means that the same request was sent again. The later answer counts.
	repeated bool
	// failure is the reason why there is no answer.
	failure error
	// location is the target of a redirect.
	location string
}

// answerExcerpt is the number of bytes of an answer that are kept.
const answerExcerpt = 1 << 10

// ErrNotSent is wrapped by a transport's error if the transport refused to send the request.
var ErrNotSent = errors.New("the request was not sent")

// requestPatience limits how long one request is repeated.
const requestPatience = 15 * time.Second

// recorder is a transport that keeps every exchange until somebody takes it. It repeats any
// request that the rack had no time for (429). It repeats a read without an answer, and a read
// whose answer means that the rack is busy.
type recorder struct {
	next http.RoundTripper
	// token is removed from the answers that are kept.
	token string
	// patience limits how long a request is repeated.
	patience time.Duration

	mu sync.Mutex
	// mu guards exchanges.
	exchanges []RecordedCall
}

// RoundTrip sends the request and reads the whole answer.
func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	end := time.Now().Add(r.patience)
	for backoff := (harness.Backoff{Next: 100 * time.Millisecond, Max: 2 * time.Second}); ; {
		exchange, resp, err := r.once(req)
		if mayRepeat(exchange) && rewind(req) {
			backoff.Next = max(backoff.Next, retryAfter(resp))
			exchange.repeated = time.Now().Add(backoff.Next).Before(end) &&
				backoff.Wait(req.Context()) == nil
		}
		r.mu.Lock()
		r.exchanges = append(r.exchanges, exchange)
		r.mu.Unlock()
		if !exchange.repeated {
			return resp, err
		}
	}
}

// mayRepeat reports whether sending the request twice has the same effect as sending it once, and
// might be answered. A certificate that is not trusted stays so.
func mayRepeat(e RecordedCall) bool {
	if untrusted := new(tls.CertificateVerificationError); errors.As(e.failure, &untrusted) {
		return false
	}
	return e.Status == http.StatusTooManyRequests ||
		e.Method == http.MethodGet && (e.unanswered() || MeansBusy(e.Status))
}

// unanswered reports whether no answer came although the request was sent and not given up.
func (e RecordedCall) unanswered() bool {
	return e.failure != nil && !errors.Is(e.failure, ErrNotSent) &&
		!errors.Is(e.failure, errAnother) && !errors.Is(e.failure, context.Canceled)
}

// rewind prepares a request to be sent again. It returns false if that is impossible.
func rewind(req *http.Request) bool {
	if req.Body == nil || req.Body == http.NoBody {
		return true
	}
	if req.GetBody == nil {
		return false
	}
	body, err := req.GetBody()
	if err != nil {
		return false
	}
	req.Body = body
	return true
}

// retryAfter returns the time that the rack asks to wait; 0 means that the caller may choose.
func retryAfter(resp *http.Response) time.Duration {
	if resp == nil {
		return 0
	}
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

func (r *recorder) once(req *http.Request) (RecordedCall, *http.Response, error) {
	began := time.Now()
	operation := OperationOf(req.Method, PathOf(req))
	exchange := RecordedCall{Operation: operation, Method: req.Method, Path: req.URL.RequestURI(),
		Began: began}
	resp, err := r.next.RoundTrip(req)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		if err != nil {
			resp = nil // a truncated answer does not count
		} else if err = another(operation, path.Base(PathOf(req)), resp.StatusCode, body); err != nil {
			resp = nil
		}
	}
	exchange.Took, exchange.failure = time.Since(began), err
	if err == nil {
		exchange.Status, exchange.RequestID = resp.StatusCode, resp.Header.Get("X-Request-Id")
		exchange.location = resp.Header.Get("Location")
		// Redact before the answer is cut, because half a token would not be recognized.
		answer := strings.ReplaceAll(string(body), r.token, "[redacted]")
		exchange.Answer = answer[:min(len(answer), answerExcerpt)]
		var refusal struct {
			ErrorCode string `json:"error_code"`
		}
		if resp.StatusCode >= 300 && json.Unmarshal(body, &refusal) == nil {
			exchange.ErrorCode = refusal.ErrorCode
		}
	}
	return exchange, resp, err
}

// errAnother means that the rack has shown another object than the one that was read.
var errAnother = errors.New("the rack shows another object")

// another returns an error if an answer shows another object than the one that was read by ID or by
// name. The reader would take the object for the right one, and might delete it.
func another(operation, which string, status int, body []byte) error {
	if status != http.StatusOK || !slices.Contains([]string{"disk_view", "snapshot_view",
		"instance_view", "image_view", "project_view"}, operation) {
		return nil
	}
	var shown struct{ ID, Name string }
	err := json.Unmarshal(body, &shown)
	if err != nil || strings.EqualFold(which, shown.ID) || which == shown.Name {
		return nil //nolint:nilerr // whoever reads the answer reports that
	}
	return fmt.Errorf("%w than %s: %s (%s)", errAnother, which, shown.Name, shown.ID)
}

func (r *recorder) take() []RecordedCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.exchanges
	r.exchanges = nil
	return taken
}

// operations are the operations that the driver and the checks use.
var operations = parseOperations(`
ping                            GET    /v1/ping
current_user_view               GET    /v1/me
current_user_access_token_list  GET    /v1/me/access-tokens
utilization_view                GET    /v1/utilization
rack_list                       GET    /v1/system/hardware/racks
silo_quotas_view                GET    /v1/system/silos/*/quotas
silo_utilization_list           GET    /v1/system/utilization/silos
project_list                    GET    /v1/projects
project_view                    GET    /v1/projects/*
disk_list                       GET    /v1/disks
disk_create                     POST   /v1/disks
disk_view                       GET    /v1/disks/*
disk_delete                     DELETE /v1/disks/*
disk_bulk_write_import          POST   /v1/disks/*/bulk-write
disk_bulk_write_import_start    POST   /v1/disks/*/bulk-write-start
disk_bulk_write_import_stop     POST   /v1/disks/*/bulk-write-stop
disk_finalize_import            POST   /v1/disks/*/finalize
snapshot_list                   GET    /v1/snapshots
snapshot_create                 POST   /v1/snapshots
snapshot_view                   GET    /v1/snapshots/*
snapshot_delete                 DELETE /v1/snapshots/*
image_list                      GET    /v1/images
image_create                    POST   /v1/images
image_view                      GET    /v1/images/*
image_delete                    DELETE /v1/images/*
image_promote                   POST   /v1/images/*/promote
image_demote                    POST   /v1/images/*/demote
instance_list                   GET    /v1/instances
instance_create                 POST   /v1/instances
instance_view                   GET    /v1/instances/*
instance_update                 PUT    /v1/instances/*
instance_delete                 DELETE /v1/instances/*
instance_start                  POST   /v1/instances/*/start
instance_stop                   POST   /v1/instances/*/stop
instance_reboot                 POST   /v1/instances/*/reboot
instance_disk_list              GET    /v1/instances/*/disks
instance_disk_attach            POST   /v1/instances/*/disks/attach
instance_disk_detach            POST   /v1/instances/*/disks/detach
instance_external_ip_list       GET    /v1/instances/*/external-ips
instance_network_interface_list GET    /v1/network-interfaces
`)

type operation struct{ name, method, pattern string }

func parseOperations(text string) []operation {
	var all []operation
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) == 3 {
			all = append(all, operation{words[0], words[1], words[2]})
		}
	}
	return all
}

// PathOf returns the path of a request.
func PathOf(req *http.Request) string { return cmp.Or(req.URL.Opaque, req.URL.Path) }

// OperationOf returns the operation of a request, or "" if it is unknown here.
func OperationOf(method, urlPath string) string {
	for _, op := range operations {
		if is, err := path.Match(op.pattern, urlPath); err == nil && is && op.method == method {
			return op.name
		}
	}
	return ""
}
