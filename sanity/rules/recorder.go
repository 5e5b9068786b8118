package rules

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"
)

// Exchange is one request to the rack and its answer.
type Exchange struct {
	// Operation is the API's operationId, or "" for a path that it does not have.
	Operation    string
	Method, Path string
	// Status is 0 when there was no answer.
	Status    int
	ErrorCode string
	RequestID string
	Took      time.Duration
	// Answer is the beginning of the answer's body.
	Answer string
}

// answerExcerpt is how much of an answer is kept, in bytes.
const answerExcerpt = 1 << 10

// recorder is a transport that keeps every exchange until somebody takes them.
type recorder struct {
	next http.RoundTripper
	// token is left out of the answers that are kept.
	token string

	mu sync.Mutex
	// mu guards exchanges.
	exchanges []Exchange
}

// RoundTrip sends the request and reads the whole answer.
func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	began := time.Now()
	operation := OperationOf(req.Method, cmp.Or(req.URL.Opaque, req.URL.Path))
	exchange := Exchange{Operation: operation, Method: req.Method, Path: req.URL.RequestURI()}
	resp, err := r.next.RoundTrip(req)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		if err != nil {
			resp = nil // what was cut off is no answer
		}
	}
	exchange.Took = time.Since(began)
	if err == nil {
		exchange.Status, exchange.RequestID = resp.StatusCode, resp.Header.Get("X-Request-Id")
		// Half a token would not be recognized by those who hide it.
		answer := strings.ReplaceAll(string(body), r.token, "[redacted]")
		exchange.Answer = answer[:min(len(answer), answerExcerpt)]
		var refusal struct {
			ErrorCode string `json:"error_code"`
		}
		if resp.StatusCode >= 300 && json.Unmarshal(body, &refusal) == nil {
			exchange.ErrorCode = refusal.ErrorCode
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exchanges = append(r.exchanges, exchange)
	return resp, err
}

// take returns the exchanges since the last take.
func (r *recorder) take() []Exchange {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.exchanges
	r.exchanges = nil
	return taken
}

// operations are those that the driver and the checks use.
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
snapshot_list                   GET    /v1/snapshots
snapshot_create                 POST   /v1/snapshots
snapshot_view                   GET    /v1/snapshots/*
snapshot_delete                 DELETE /v1/snapshots/*
image_list                      GET    /v1/images
image_view                      GET    /v1/images/*
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

// OperationOf names the operation of a request, or "" for one that is not known here.
func OperationOf(method, urlPath string) string {
	for _, op := range operations {
		if is, err := path.Match(op.pattern, urlPath); err == nil && is && op.method == method {
			return op.name
		}
	}
	return ""
}
