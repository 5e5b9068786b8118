package rules

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Config names the rack to check, and limits what the checks may use of it.
type Config struct {
	// Host, Token and Project have the meaning of the driver's settings of those names. CAFile, if
	// it is not empty, is a file with the authority of a private certificate in PEM.
	Host, Token, Project, CAFile string
	// Mark is the run's mark: 1 to 8 of a-z0-9. It is part of the names of all objects that the
	// checks create. Description is their description.
	Mark, Description string
	// Hotplug is true if the rack attaches and detaches disks while an instance runs. AttachOnly is
	// true if it only attaches them.
	Hotplug, AttachOnly bool
	// Here is the instance in which this program runs, or nil. Rules about guests are not tested
	// without a guest in which a disk appears.
	Here *GuestFiles
	// Through, if it is not nil, wraps the transport of all requests to the rack.
	Through func(http.RoundTripper) http.RoundTripper
	// Admin is the admin listener of a simulated rack. It is nil for a real rack.
	Admin *adminapi.Client
	// Restart, if it is not nil, ends the rack as a power cut does and starts it again.
	Restart func(context.Context) error
}

// GuestFiles is an instance whose /sys can be read.
type GuestFiles struct {
	// ID is the instance's ID.
	ID  string
	Sys fs.FS
}

// TestedRack is a rack that is being checked. Its checks run one at a time.
type TestedRack struct {
	Config
	// Client is Oxide's own client, unmodified.
	Client *oxide.Client

	recorder *recorder
	http     *http.Client
	// closeIdle closes the connections that no request uses.
	closeIdle func()
	// cleaning limits the removal of what a check created.
	cleaning time.Duration
	// pause is the longest time between two tries of a check.
	pause time.Duration
	// made counts the names that Name has returned.
	made int
	// stopped is the shared instance that is never started.
	stopped *oxide.Instance
	// running is the shared instance that is never stopped. Its disk was attached before its start.
	running     *oxide.Instance
	runningDisk *oxide.Disk
}

// Open prepares the checks. It sends no request to the rack.
func Open(c Config) (*TestedRack, error) {
	transport, err := harness.Transport(c.CAFile)
	if err != nil {
		return nil, err
	}
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
		// A rack does not redirect, and a request to another host would carry the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	r.Client, err = oxide.NewClient(oxide.WithHost(c.Host), oxide.WithToken(c.Token),
		oxide.WithHTTPClient(r.http))
	if err != nil {
		return nil, fmt.Errorf("make a client of the rack: %w", err)
	}
	return r, nil
}

// connections keeps open the connections of reads, whose handshake costs more than the read. A
// change has a connection of its own: a proxy may close a kept one just when the request is sent,
// and then nobody knows whether the rack has received it.
type connections struct{ reads, changes http.RoundTripper }

func (c connections) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		return c.reads.RoundTrip(r)
	}
	return c.changes.RoundTrip(r)
}

// triesPause gives a busy rack time to do its work.
const triesPause = 2 * time.Second

// requestTimeout limits a request, which may run a saga on a busy rack.
const requestTimeout = 2 * time.Minute

// idleTimeout limits how long a connection stays open for the next request.
const idleTimeout = 3 * time.Second

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

// Exchanges returns the requests and answers outside of checks since its last call.
func (r *TestedRack) Exchanges() []RecordedCall { return r.recorder.take() }

func refusal(err error) *oxide.HTTPError {
	var refused *oxide.HTTPError
	if errors.As(err, &refused) {
		return refused
	}
	return nil
}

// Brief describes an error of the client in one line, because the error's own text fills a page.
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

// IsUnanswered reports whether a call of the client ended without a readable answer. The client's
// error does not show the cause.
func IsUnanswered(err error) bool { return err != nil && refusal(err) == nil }

// IsGone reports whether the rack answered that the object does not exist.
func IsGone(err error) bool { return err != nil && gone(err) == nil }

// gone turns the error "not found" into a success.
func gone(err error) error {
	if errors.Is(err, oxide.ErrHTTP404) {
		return nil
	}
	return err
}

// Refused is a rack's refusal of a request.
type Refused struct {
	Status int
	// Code is the error_code; "" means that there is none.
	Code string
	// Message is the whole message.
	Message string
}

func (r Refused) String() string {
	if r.Status < 300 {
		return fmt.Sprintf("HTTP %d", r.Status)
	}
	return fmt.Sprintf("HTTP %d %s: %s", r.Status, cmp.Or(r.Code, "without a code"), r.Message)
}

// refusedBy returns the rack's refusal in an error of the client, or the zero value.
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

// Answer is the rack's answer to a plain request.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Refused reads the answer as a refusal.
func (a Answer) Refused() Refused {
	var body struct {
		ErrorCode string `json:"error_code"`
		Message   string `json:"message"`
	}
	_ = json.Unmarshal(a.Body, &body) // only a refusal has these fields
	return Refused{a.Status, body.ErrorCode, body.Message}
}
