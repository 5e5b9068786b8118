// Package legal tests that a program which checks racks does not blame a healthy rack. A proxy
// between program and rack alters when and how the rack answers. Each alteration can be the work of
// a healthy rack, of the network, or of other users of the silo. So no verdict may count it as a
// failure of the rack.
package legal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Kind is one alteration of a rack's answers.
type Kind struct {
	// Name identifies the alteration in reports. Says describes the altered answers.
	Name, Says string
	busy       bool // whether Strangers works in the silo
	more       int  // the number of further, concurrent runs
	// alter answers a request; nil means the rack's own answer.
	alter func(*proxy, *http.Request) (*http.Response, error)
}

// Others reports whether another run or other users use the rack at the same time.
func (k Kind) Others() bool { return k.busy || k.more > 0 }

// Kinds lists every alteration.
var Kinds = []Kind{
	{Name: "ready-early", Says: "a snapshot is ready when it is first seen, and answered later",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			switch {
			case !strings.HasPrefix(r.URL.Path, "/v1/snapshots"):
			case r.Method != http.MethodPost:
				p.taking.RLock()
				defer p.taking.RUnlock()
			default:
				defer linger(r, lateness)
				p.taking.Lock()
				defer p.taking.Unlock()
			}
			return p.forward(r)
		}},
	{Name: "slow", Says: "each answer takes 20 ms more, and comes in pieces",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			resp, err := p.forward(r)
			switch {
			case err != nil:
			case resp.ContentLength < 0: // unknown
				resp.Body = &slowly{resp.Body, r, 4 << 10}
			default:
				resp.Body = &slowly{resp.Body, r, resp.ContentLength/4 + 1}
			}
			return resp, err
		}},
	{Name: "limited", Says: "more than 20 requests in a second are answered 429",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			if p.passes() {
				return p.forward(r)
			}
			return Answer(r, http.StatusTooManyRequests, "Too Many Requests\n", "Retry-After", "1"), nil
		}},
	{Name: "unavailable", Says: "one request in a hundred is answered 503",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			if !p.strikes() {
				return p.forward(r)
			}
			return Answer(r, http.StatusServiceUnavailable, `{"request_id":"1","error_code":`+
				`"ServiceNotAvailable","message":"Service Unavailable"}`, "X-Request-Id", "1"), nil
		}},
	{Name: "reset-before", Says: "one connection in a hundred is reset before the effect",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			if p.strikes() {
				return nil, errReset
			}
			return p.forward(r)
		}},
	{Name: "reset-after", Says: "one connection in a hundred is reset after the effect",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			resp, err := p.forward(r)
			if err == nil && p.strikes() {
				return nil, errors.Join(errReset, resp.Body.Close())
			}
			return resp, err
		}},
	{Name: "away", Says: "the rack cannot be reached for 3 s, now and then",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			if p.leave(func() time.Duration { return 3 * time.Second }) {
				return nil, errReset
			}
			return p.forward(r)
		}},
	{Name: "restarted", Says: "the rack's API is restarted, now and then",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			p.leave(func() time.Duration {
				p.rack.Kill()
				if err := p.rack.Start(context.WithoutCancel(r.Context())); err != nil {
					panic(err) // the test's rack is broken
				}
				p.next.CloseIdleConnections() // they lead to the rack that was killed
				return 0
			})
			return p.forward(r)
		}},
	{Name: "twins", Says: "two runs check the rack at once", more: 1},
	{Name: "busy", Says: "others make and delete disks, snapshots and instances", busy: true},
	{Name: "no-request-id", Says: "a proxy removes x-request-id",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			resp, err := p.forward(r)
			if err == nil {
				resp.Header.Del("X-Request-Id")
			}
			return resp, err
		}},
	{Name: "unknown-fields", Says: "objects have fields of another release",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			resp, err := p.forward(r)
			return Edit(resp, err, func(_ string, object map[string]any) {
				object["of_another_release"] = map[string]any{"list": []int{1}, "text": "new"}
			})
		}},
	{Name: "clock-skew", Says: "the rack's clock is an hour behind",
		alter: func(p *proxy, r *http.Request) (*http.Response, error) {
			resp, err := p.forward(r)
			if err == nil {
				at := time.Now().Add(-time.Hour).UTC()
				resp.Header.Set("Date", at.Format(http.TimeFormat))
			}
			return Edit(resp, err, func(_ string, object map[string]any) {
				for name, value := range object {
					text, is := value.(string)
					if at, err := time.Parse(time.RFC3339Nano, text); is && err == nil &&
						strings.HasPrefix(name, "time_") {
						object[name] = strings.Replace(text, at.Format("2006-01-02T15"),
							at.Add(-time.Hour).Format("2006-01-02T15"), 1)
					}
				}
			})
		}},
}

type proxy struct {
	rack *harness.Rack
	next *http.Transport // to the rack
	// taking is locked while a snapshot is taken, so that nobody sees the snapshot before it is ready.
	taking sync.RWMutex

	mu sync.Mutex
	// mu guards the fields below. The rack is away from request number awayNext until time backAt.
	rand     *rand.Rand
	requests int
	backAt   time.Time
	awayNext int
	recent   []time.Time // when the requests of the last second came
}

// forward sends the request to the rack, which completes it even if the caller has gone.
func (p *proxy) forward(r *http.Request) (*http.Response, error) {
	return p.next.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
}

// errReset makes the proxy reset the caller's connection, as every transport error does.
var errReset = errors.New("the connection was reset")

// Answer answers a request without sending it to the rack. header has pairs of name and value.
func Answer(r *http.Request, status int, body string, header ...string) *http.Response {
	if r.Body != nil {
		_ = r.Body.Close()
	}
	w := httptest.NewRecorder()
	for i := 0; i+1 < len(header); i += 2 {
		w.Header().Set(header[i], header[i+1])
	}
	w.WriteHeader(status)
	_, _ = w.WriteString(body) // into memory
	resp := w.Result()
	resp.Request = r
	return resp
}

type slowly struct {
	io.ReadCloser
	request *http.Request
	piece   int64
}

func (s *slowly) Read(p []byte) (int, error) {
	linger(s.request, 5*time.Millisecond)
	return s.ReadCloser.Read(p[:min(int64(len(p)), s.piece)])
}

func linger(r *http.Request, pause time.Duration) {
	backoff := harness.Backoff{Next: pause}
	_ = backoff.Wait(r.Context()) // a caller that has gone does not wait
}

const lateness = 100 * time.Millisecond

func (p *proxy) passes() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for len(p.recent) > 0 && now.Sub(p.recent[0]) >= time.Second {
		p.recent = p.recent[1:]
	}
	if len(p.recent) < 20 {
		p.recent = append(p.recent, now)
		return true
	}
	return false
}

func (p *proxy) strikes() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rand.IntN(100) == 0
}

// absence is the average number of requests between two outages of the rack.
const absence = 300

// leave begins an outage of length gone() if one is due. It returns true during an outage.
func (p *proxy) leave(gone func() time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests++
	if p.requests == p.awayNext {
		p.awayNext += absence/2 + p.rand.IntN(absence)
		p.backAt = time.Now().Add(gone())
	}
	return time.Now().Before(p.backAt)
}

// Edit calls change() for each JSON object of a successful answer. The parameter "at" is the path
// to the object, such as "a.b.". The path omits fields whose values are lists.
func Edit(resp *http.Response, err error, change func(at string, object map[string]any),
) (*http.Response, error) {
	if err != nil || resp.StatusCode >= 300 {
		return resp, err
	}
	text, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	var visit func(string, any)
	visit = func(at string, value any) {
		object, _ := value.(map[string]any)
		for name, inner := range object {
			items, _ := inner.([]any)
			for _, item := range items {
				visit(at, item)
			}
			visit(at+name+".", inner)
		}
		if object != nil {
			change(at, object)
		}
	}
	var body any
	decode := json.NewDecoder(bytes.NewReader(text))
	decode.UseNumber()
	if decode.Decode(&body) == nil {
		visit("", body)
		if text, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	resp.Header.Del("Content-Length")
	return resp, nil
}

// RoundTrip is a function as an http.RoundTripper.
type RoundTrip func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f RoundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Try starts a proxy that applies an alteration in front of a rack, and calls run with its address.
// For some kinds it calls run twice at the same time, or starts Strangers, too.
func Try(ctx context.Context, rack *harness.Rack, k Kind, seed uint64, run func(host string) error,
) (err error) {
	defer harness.Catch(&err)
	transport := harness.Got(harness.Transport(rack.CA))
	host := harness.Got(url.Parse(rack.URL))
	// Keep connections open, because a TLS handshake takes longer than most requests.
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, 3*time.Second
	p := &proxy{rack: rack, next: transport, rand: rand.New(rand.NewPCG(seed, seed))}
	p.awayNext = 20 + p.rand.IntN(60)
	if k.alter == nil {
		k.alter = (*proxy).forward
	}
	server := httptest.NewServer(&httputil.ReverseProxy{FlushInterval: -1, // at once
		Transport:    RoundTrip(func(r *http.Request) (*http.Response, error) { return k.alter(p, r) }),
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		// The rack receives path and query exactly as they were sent.
		Rewrite: func(r *httputil.ProxyRequest) {
			path, _, _ := strings.Cut(r.In.RequestURI, "?")
			r.SetURL(host)
			r.Out.URL.Opaque, r.Out.URL.RawQuery = "//"+host.Host+path, r.In.URL.RawQuery
		}})
	defer server.Close()
	working, end := context.WithCancel(ctx)
	var strangers, runs errgroup.Group
	if k.busy {
		strangers.Go(func() error { return Strangers(working, rack) })
	}
	for range 1 + k.more {
		runs.Go(func() error { return run(server.URL) })
	}
	err = runs.Wait()
	end()
	return errors.Join(err, strangers.Wait())
}

// Strangers works in a rack's project until the context ends, as other users of the silo do. It
// creates, changes and removes objects with names like those of a run, and leaves none. It returns
// an error if somebody else has changed one of them.
func Strangers(ctx context.Context, rack *harness.Rack) (err error) {
	defer harness.Catch(&err)
	project := oxide.NameOrId(rack.Project)
	// The calls ignore the end of ctx, so that no work stays half done.
	for n, all := 0, context.WithoutCancel(ctx); ctx.Err() == nil; n++ {
		name := oxide.Name(fmt.Sprintf("conf-1a2b3c4d-%05d", 100+n))
		instance := harness.Got(rack.Client.InstanceCreate(all, oxide.InstanceCreateParams{
			Project: project, Body: &oxide.InstanceCreate{Name: name, Description: "mine",
				Hostname: "mine", Ncpus: 1, Memory: oxide.ByteCount(harness.GiB),
				Start: oxide.NewPointer(false)}}))
		disk := harness.Got(rack.CreateDisk(all, rack.Project, string(name), harness.GiB))
		snapshot := harness.Got(rack.Client.SnapshotCreate(all, oxide.SnapshotCreateParams{
			Project: project, Body: &oxide.SnapshotCreate{Name: name, Description: "mine",
				Disk: oxide.NameOrId(name)}}))
		image := harness.Got(rack.Client.ImageCreate(all, oxide.ImageCreateParams{Project: project,
			Body: &oxide.ImageCreate{Name: name, Description: "mine", Os: "x", Version: "1",
				Source: oxide.ImageSource{Value: &oxide.ImageSourceSnapshot{Id: snapshot.Id}}}}))
		harness.Must(errors.Join(rack.AttachDisk(all, disk.Id, instance.Id),
			rack.StartInstance(all, instance.Id), rack.StopInstance(all, instance.Id),
			rack.DetachDisk(all, disk.Id, instance.Id), rack.DeleteDisk(all, disk.Id),
			rack.Client.SnapshotDelete(all, oxide.SnapshotDeleteParams{
				Snapshot: oxide.NameOrId(snapshot.Id)}),
			rack.Client.ImageDelete(all, oxide.ImageDeleteParams{Image: oxide.NameOrId(image.Id)}),
			rack.Client.InstanceDelete(all, oxide.InstanceDeleteParams{
				Instance: oxide.NameOrId(instance.Id)})))
	}
	return nil
}
