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
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Config configures the checks of a rack.
type Config struct {
	// Host, Token and Project have the meaning of the driver's settings. CAFile is "" or a PEM file
	// with the authority of a private certificate.
	Host, Token, Project, CAFile string
	// Mark is the run's mark: 1 to 8 characters of a-z0-9. The name of every object that the
	// checks create contains it. Description is the description of these objects.
	Mark, Description string
	// Hotplug means that the rack attaches and detaches disks while an instance runs, and AttachOnly
	// that it only attaches them.
	Hotplug, AttachOnly bool
	// Here is the instance in which this program runs. If it is nil, rules about guests are not
	// tested.
	Here *GuestFiles
	// Through wraps the transport of all requests to the rack, if it is not nil.
	Through func(http.RoundTripper) http.RoundTripper
	// Admin is the admin listener of a simulated rack, and nil for a real one.
	Admin *adminapi.Client
}

// GuestFiles is an instance whose /sys can be read.
type GuestFiles struct {
	ID  string // the instance's
	Sys fs.FS
}

// TestedRack is a rack on which checks run one at a time.
type TestedRack struct {
	Config
	// Client is Oxide's own client, unmodified.
	Client *oxide.Client

	recorder  *recorder
	http      *http.Client
	closeIdle func()
	// cleaning limits a check's clean-up. pause is the longest pause between two tries of a check.
	cleaning, pause time.Duration
	made            int
	// The checks share these objects. The instance in stopped is never started, and the one in running
	// is never stopped. runningDisk is attached to the latter.
	stopped, running *oxide.Instance
	runningDisk      *oxide.Disk
}

// Open prepares the checks without a request to the rack.
func Open(c Config) (_ *TestedRack, err error) {
	defer harness.Catch(&err)
	transport := harness.Got(harness.Transport(c.CAFile))
	reads := transport.Clone()
	reads.DisableKeepAlives, reads.IdleConnTimeout = false, idleTimeout
	var next http.RoundTripper = connections{reads: reads, changes: transport}
	if c.Through != nil {
		next = c.Through(next)
	}
	r := &TestedRack{Config: c, cleaning: cleanTimeout, pause: triesPause,
		closeIdle: reads.CloseIdleConnections,
		recorder:  &recorder{next: next, token: c.Token, patience: requestPatience}}
	r.http = &http.Client{Transport: r.recorder, Timeout: requestTimeout,
		// Follow no redirect: a rack sends none, and a request to another host would carry the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	r.Client, err = oxide.NewClient(oxide.WithHost(c.Host), oxide.WithToken(c.Token),
		oxide.WithHTTPClient(r.http))
	return r, harness.Wrap(err, "make a client of the rack")
}

// connections reuses connections for reads, because a handshake takes longer than a read. Each
// change has a new connection: a proxy may close a reused one while the request is sent, and then
// nobody knows whether the rack has received the change.
type connections struct{ reads, changes http.RoundTripper }

func (c connections) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		return c.reads.RoundTrip(r)
	}
	return c.changes.RoundTrip(r)
}

const (
	// triesPause is the longest pause before a failed check is repeated on a busy rack.
	triesPause = 2 * time.Second
	// requestTimeout limits one request, which may run a saga on a busy rack. requestPatience limits
	// how long a request is repeated.
	requestTimeout, requestPatience = 2 * time.Minute, 15 * time.Second
	idleTimeout                     = 3 * time.Second
	answerExcerpt                   = 1 << 10
)

// Close removes the objects that the checks shared, and closes the connections.
func (r *TestedRack) Close(ctx context.Context) error {
	defer r.closeIdle()
	var errs []error
	removed := func(name oxide.Name, id string, remove func(context.Context, string) error) bool {
		err := Patiently(ctx, func(ctx context.Context) error { return remove(ctx, id) })
		if err != nil {
			errs = append(errs, fmt.Errorf("delete %s, which the checks shared: %s", name, Brief(err)))
		}
		return err == nil
	}
	for _, instance := range []**oxide.Instance{&r.stopped, &r.running} {
		if *instance != nil && removed((*instance).Name, (*instance).Id, r.RemoveInstance) {
			*instance = nil
		}
	}
	if disk := r.runningDisk; disk != nil && removed(disk.Name, disk.Id, r.removeDisk) {
		r.runningDisk = nil
	}
	return errors.Join(errs...)
}

// HTTP returns the HTTP client that sends the requests.
func (r *TestedRack) HTTP() *http.Client { return r.http }

// Exchanges returns and forgets the requests and answers since its last call or the last check.
func (r *TestedRack) Exchanges() []RecordedCall { return r.recorder.take() }

func refusal(err error) *oxide.HTTPError {
	refused, _ := errors.AsType[*oxide.HTTPError](err)
	return refused
}

// Brief returns an error of the client in one line. The client's text for an error fills a page.
func Brief(err error) string {
	refused := refusal(err)
	if refused == nil {
		return err.Error()
	}
	status := statusOf(err)
	if redirects(status) && refused.HTTPResponse.Header.Get("Location") != "" {
		return fmt.Sprintf("HTTP %d: the rack is at %s, which OXIDE_HOST has to name", status,
			refused.HTTPResponse.Header.Get("Location"))
	}
	if refused.ErrorResponse == nil {
		return fmt.Sprintf("HTTP %d with a body that is no error of a rack", status)
	}
	return fmt.Sprintf("HTTP %d %s: %s (request %s)", status,
		cmp.Or(refused.ErrorResponse.ErrorCode, "without a code"), refused.ErrorResponse.Message,
		refused.ErrorResponse.RequestId)
}

func redirects(status int) bool { return status >= 300 && status < 400 }

// IsBusy reports whether the rack has refused because it is busy (429, 502, 503, 504).
func IsBusy(err error) bool { return MeansBusy(statusOf(err)) }

func statusOf(err error) int {
	if refused := refusal(err); refused != nil && refused.HTTPResponse != nil {
		return refused.HTTPResponse.StatusCode
	}
	return 0
}

// IsUnanswered reports whether a call of the client got no readable answer, whatever the cause.
func IsUnanswered(err error) bool { return err != nil && refusal(err) == nil }

// IsGone reports whether the rack answered that the object does not exist.
func IsGone(err error) bool { return err != nil && gone(err) == nil }

func gone(err error) error {
	if errors.Is(err, oxide.ErrHTTP404) {
		return nil
	}
	return err
}

// Refused is a rack's refusal of a request.
type Refused struct {
	Status  int
	Code    string // the error_code; "" means that there is none
	Message string // the whole message
}

func (r Refused) String() string {
	if r.Status < 300 {
		return fmt.Sprintf("HTTP %d", r.Status)
	}
	return fmt.Sprintf("HTTP %d %s: %s", r.Status, cmp.Or(r.Code, "without a code"), r.Message)
}

// refusedBy returns the refusal in an error of the client, or the zero value.
func refusedBy(err error) Refused {
	refused := refusal(err)
	if refused == nil || refused.HTTPResponse == nil || refused.ErrorResponse == nil {
		return Refused{}
	}
	return Refused{refused.HTTPResponse.StatusCode, refused.ErrorResponse.ErrorCode,
		refused.ErrorResponse.Message}
}

func equal[T comparable](c *Check, what string, got, want T) {
	if got != want {
		c.errorf("%s: expected %v; found %v", what, want, got)
	}
}

// Answer is the rack's answer to a request that was sent without Oxide's client (see [Plain]).
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Refused returns the answer as a refusal.
func (a Answer) Refused() Refused {
	body := errorIn(a.Body)
	return Refused{a.Status, body.ErrorCode, body.Message}
}

func errorIn(body []byte) (e oxide.ErrorResponse) {
	_ = json.Unmarshal(body, &e) // only a refusal has these fields
	return e
}

// RecordedCall is one request to the rack and its answer.
type RecordedCall struct {
	// Operation is the API's operationId; "" means that the path is unknown.
	Operation    string
	Method, Path string
	// Status is 0 without an answer.
	Status    int
	ErrorCode string
	RequestID string
	Began     time.Time
	Took      time.Duration
	Answer    string // the beginning of the body, without the token

	repeated bool   // the same request was sent again, and the later answer counts
	failure  error  // why there is no answer
	location string // the target of a redirect
}

// ErrNotSent is wrapped by the error of a transport that refused to send a request.
var ErrNotSent = errors.New("the request was not sent")

// recorder is a transport that keeps every exchange until take returns it. It repeats every request
// that is answered 429, and every read that was not answered or that a busy rack refused.
type recorder struct {
	next     http.RoundTripper
	token    string        // removed from the answers that are kept
	patience time.Duration // how long a request is repeated

	mu sync.Mutex
	// mu guards exchanges.
	exchanges []RecordedCall
}

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

// mayRepeat reports whether it is safe to repeat the request, and whether a repetition may get
// another answer. It returns false for an untrusted certificate, which stays untrusted.
func mayRepeat(e RecordedCall) bool {
	if _, untrusted := errors.AsType[*tls.CertificateVerificationError](e.failure); untrusted {
		return false
	}
	return e.Status == http.StatusTooManyRequests ||
		e.Method == http.MethodGet && (e.unanswered() || MeansBusy(e.Status))
}

func (e RecordedCall) unanswered() bool {
	return e.failure != nil && !errors.Is(e.failure, ErrNotSent) &&
		!errors.Is(e.failure, errAnother) && !errors.Is(e.failure, context.Canceled)
}

// rewind restores the request's body, or returns false if the request cannot be sent again.
func rewind(req *http.Request) bool {
	if req.GetBody == nil {
		return req.Body == nil || req.Body == http.NoBody
	}
	body, err := req.GetBody()
	req.Body = body
	return err == nil
}

// retryAfter returns the pause that the rack asks for, or 0 if the caller may choose the pause.
func retryAfter(resp *http.Response) time.Duration {
	if resp == nil {
		return 0
	}
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil {
		return 0
	}
	return max(time.Duration(seconds)*time.Second, 0)
}

func (r *recorder) once(req *http.Request) (RecordedCall, *http.Response, error) {
	exchange := RecordedCall{Operation: OperationOf(req.Method, PathOf(req)), Method: req.Method,
		Path: req.URL.RequestURI(), Began: time.Now()}
	resp, err := r.next.RoundTrip(req)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
	}
	if err == nil {
		err = another(exchange.Operation, path.Base(PathOf(req)), resp.StatusCode, body)
	}
	exchange.Took, exchange.failure = time.Since(exchange.Began), err
	if err != nil {
		return exchange, nil, err // a truncated answer does not count
	}
	exchange.Status, exchange.RequestID = resp.StatusCode, resp.Header.Get("X-Request-Id")
	exchange.location = resp.Header.Get("Location")
	// Redact before the cut, because half a token would not be recognized.
	answer := strings.ReplaceAll(string(body), r.token, "[redacted]")
	exchange.Answer = answer[:min(len(answer), answerExcerpt)]
	if resp.StatusCode >= 300 {
		exchange.ErrorCode = errorIn(body).ErrorCode
	}
	return exchange, resp, nil
}

// errAnother means that the rack has shown another object than the one asked for.
var errAnother = errors.New("the rack shows another object")

// another() returns errAnother if a read by ID or by name shows an object with another ID and name.
// Without this error the caller might delete that object.
func another(operation, which string, status int, body []byte) error {
	if status != http.StatusOK || !slices.Contains([]string{"disk_view", "snapshot_view",
		"instance_view", "image_view", "project_view"}, operation) {
		return nil
	}
	var shown struct{ ID, Name string }
	err := json.Unmarshal(body, &shown)
	if err != nil || strings.EqualFold(which, shown.ID) || which == shown.Name {
		return nil //nolint:nilerr // the reader of the answer reports it
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

type operation struct{ name, method, pattern string }

var operations = slices.Concat(objects("disk"), objects("snapshot"), objects("image"),
	objects("instance"), []operation{
		{"ping", "GET", "/v1/ping"},
		{"current_user_view", "GET", "/v1/me"},
		{"current_user_access_token_list", "GET", "/v1/me/access-tokens"},
		{"utilization_view", "GET", "/v1/utilization"},
		{"rack_list", "GET", "/v1/system/hardware/racks"},
		{"silo_quotas_view", "GET", "/v1/system/silos/*/quotas"},
		{"silo_utilization_list", "GET", "/v1/system/utilization/silos"},
		{"project_list", "GET", "/v1/projects"},
		{"project_view", "GET", "/v1/projects/*"},
		{"disk_bulk_write_import", "POST", "/v1/disks/*/bulk-write"},
		{"disk_bulk_write_import_start", "POST", "/v1/disks/*/bulk-write-start"},
		{"disk_bulk_write_import_stop", "POST", "/v1/disks/*/bulk-write-stop"},
		{"disk_finalize_import", "POST", "/v1/disks/*/finalize"},
		{"image_promote", "POST", "/v1/images/*/promote"},
		{"image_demote", "POST", "/v1/images/*/demote"},
		{"instance_update", "PUT", "/v1/instances/*"},
		{"instance_start", "POST", "/v1/instances/*/start"},
		{"instance_stop", "POST", "/v1/instances/*/stop"},
		{"instance_reboot", "POST", "/v1/instances/*/reboot"},
		{"instance_disk_list", "GET", "/v1/instances/*/disks"},
		{"instance_disk_attach", "POST", "/v1/instances/*/disks/attach"},
		{"instance_disk_detach", "POST", "/v1/instances/*/disks/detach"},
		{"instance_external_ip_list", "GET", "/v1/instances/*/external-ips"},
		{"instance_network_interface_list", "GET", "/v1/network-interfaces"},
	})

func objects(kind string) []operation {
	all, one := "/v1/"+kind+"s", "/v1/"+kind+"s/*"
	return []operation{{kind + "_list", "GET", all}, {kind + "_create", "POST", all},
		{kind + "_view", "GET", one}, {kind + "_delete", "DELETE", one}}
}

// PathOf returns the path of a request.
func PathOf(req *http.Request) string { return cmp.Or(req.URL.Opaque, req.URL.Path) }

// OperationOf returns the operation of a request, or "" if it is unknown.
func OperationOf(method, urlPath string) string {
	for _, op := range operations {
		if is, err := path.Match(op.pattern, urlPath); err == nil && is && op.method == method {
			return op.name
		}
	}
	return ""
}
