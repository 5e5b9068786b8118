// Package legal tests that a program which checks racks does not blame a healthy one. A proxy
// between the rack and the program alters when and how the rack answers. A rack in order, the
// network in front of it, and other users of its silo may cause each alteration, so no verdict may
// count it as a failure of the rack.
package legal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Kind is one alteration that the rack is not to blame for.
type Kind struct {
	// Name identifies the alteration in reports. Says states how the rack's answers differ.
	Name, Says string
	busy       bool  // Strangers work in the silo meanwhile
	more       int   // the number of further runs that check the rack at the same time
	room       int64 // the free part of the silo's quota; 0 means much
	// alter answers a request. If it is nil, the rack's own answer is returned.
	alter func(*proxy, *http.Request) answer
}

// Kinds lists every alteration.
func Kinds() []Kind {
	return []Kind{
		{Name: "late", Says: "a change is answered 100 ms after its effect",
			alter: func(p *proxy, r *http.Request) answer {
				if r.Method != http.MethodGet {
					defer linger(r, lateness)
				}
				return p.forward(r)
			}},
		{Name: "ready-early", Says: "a snapshot is ready when it is first seen, and answered later",
			alter: func(p *proxy, r *http.Request) answer {
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
			alter: func(p *proxy, r *http.Request) answer {
				a := p.forward(r)
				a.slowly = true
				return a
			}},
		{Name: "limited", Says: "more than 20 requests in a second are answered 429",
			alter: func(p *proxy, r *http.Request) answer {
				wait := p.pass(20)
				if wait == 0 {
					return p.forward(r)
				}
				seconds := int((wait + time.Second - 1) / time.Second)
				return answer{status: http.StatusTooManyRequests, body: []byte("Too Many Requests\n"),
					header: http.Header{"Retry-After": {strconv.Itoa(seconds)}}}
			}},
		{Name: "unavailable", Says: "one request in a hundred is answered 503",
			alter: func(p *proxy, r *http.Request) answer {
				if !p.strikes() {
					return p.forward(r)
				}
				id := uuid.NewString()
				return answer{status: http.StatusServiceUnavailable,
					header: http.Header{"X-Request-Id": {id}}, body: fmt.Appendf(nil, `{"request_id":%q,`+
						`"error_code":"ServiceNotAvailable","message":"Service Unavailable"}`, id)}
			}},
		{Name: "reset-before", Says: "one connection in a hundred is reset before the effect",
			alter: func(p *proxy, r *http.Request) answer {
				if p.strikes() {
					panic(http.ErrAbortHandler)
				}
				return p.forward(r)
			}},
		{Name: "reset-after", Says: "one connection in a hundred is reset after the effect",
			alter: func(p *proxy, r *http.Request) answer {
				a := p.forward(r)
				if p.strikes() {
					panic(http.ErrAbortHandler)
				}
				return a
			}},
		{Name: "away", Says: "the rack cannot be reached for 3 s, now and then",
			alter: func(p *proxy, r *http.Request) answer {
				if p.leave(func() time.Duration { return 3 * time.Second }) {
					panic(http.ErrAbortHandler)
				}
				return p.forward(r)
			}},
		{Name: "restarted", Says: "the rack's API is restarted, now and then",
			alter: func(p *proxy, r *http.Request) answer {
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
			alter: func(p *proxy, r *http.Request) answer {
				a := p.forward(r)
				a.header.Del("X-Request-Id")
				return a
			}},
		{Name: "redirect", Says: "the rack is at another address now",
			alter: func(p *proxy, r *http.Request) answer {
				return answer{status: http.StatusPermanentRedirect, header: http.Header{
					"Location": {strings.TrimSuffix(p.host.String(), "/") + r.RequestURI}}}
			}},
		{Name: "unknown-fields", Says: "objects have fields of another release",
			alter: func(p *proxy, r *http.Request) answer {
				return edited(p.forward(r), func(object map[string]any) {
					object["of_another_release"] = map[string]any{"list": []int{1}, "text": "new"}
				})
			}},
		{Name: "clock-skew", Says: "the rack's clock is an hour behind",
			alter: func(p *proxy, r *http.Request) answer {
				a := edited(p.forward(r), func(object map[string]any) {
					for name, value := range object {
						text, is := value.(string)
						if at, err := time.Parse(time.RFC3339Nano, text); is && err == nil &&
							strings.HasPrefix(name, "time_") {
							object[name] = strings.Replace(text, at.Format("2006-01-02T15"),
								at.Add(-time.Hour).Format("2006-01-02T15"), 1)
						}
					}
				})
				a.header.Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat))
				return a
			}},
		{Name: "near-quota", Says: "3 GiB of the silo's quota are left", room: 3 * harness.GiB},
	}
}

// proxy answers requests in place of a rack.
type proxy struct {
	rack *harness.Rack
	// host is the rack's address, and next the transport to it.
	host *url.URL
	next *http.Transport
	// taking is locked while a snapshot is taken, so that nobody can see the snapshot before it is
	// ready.
	taking sync.RWMutex

	mu sync.Mutex
	// mu guards the fields below. The rack is away from request number awayNext until backAt.
	rand     *rand.Rand
	requests int
	backAt   time.Time
	awayNext int
	recent   []time.Time // of the requests of the last second
}

type answer struct {
	status int
	header http.Header
	body   []byte
	slowly bool // the body is sent in pieces
}

// forward sends the request to the rack. If the rack does not answer, it resets the caller's
// connection.
func (p *proxy) forward(r *http.Request) answer {
	// The rack carries out a request even if its caller has gone.
	asked := r.Clone(context.WithoutCancel(r.Context()))
	asked.URL.Scheme, asked.URL.Host = p.host.Scheme, p.host.Host
	// The rack receives the path exactly as it was sent.
	path, _, _ := strings.Cut(r.RequestURI, "?")
	asked.URL.Opaque = "//" + p.host.Host + path
	asked.Host, asked.RequestURI = p.host.Host, ""
	resp, err := p.next.RoundTrip(asked)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: body}
}

func (a answer) send(w http.ResponseWriter, r *http.Request) {
	maps.Copy(w.Header(), a.header)
	w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	if a.status == http.StatusNoContent {
		w.Header().Del("Content-Length")
	}
	w.WriteHeader(a.status)
	const pause, pieces = 5 * time.Millisecond, 4
	for i := range pieces {
		if !a.slowly {
			break
		}
		linger(r, pause)
		n := len(a.body) / (pieces - i)
		_, _ = w.Write(a.body[:n]) // the caller may be gone
		a.body = a.body[n:]
		_ = http.NewResponseController(w).Flush()
	}
	_, _ = w.Write(a.body)
}

func linger(r *http.Request, pause time.Duration) {
	backoff := harness.Backoff{Next: pause}
	_ = backoff.Wait(r.Context()) // a caller that has gone does not wait
}

const lateness = 100 * time.Millisecond

// pass counts a request. If there were too many in the last second, it returns how long the caller
// must wait.
func (p *proxy) pass(most int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for len(p.recent) > 0 && now.Sub(p.recent[0]) >= time.Second {
		p.recent = p.recent[1:]
	}
	if len(p.recent) >= most {
		return time.Second - now.Sub(p.recent[0])
	}
	p.recent = append(p.recent, now)
	return 0
}

func (p *proxy) strikes() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rand.IntN(100) == 0
}

// absence is the average number of requests between two absences of the rack.
const absence = 300

// leave reports whether the rack is away now. When an absence begins, gone returns its duration.
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

func edited(a answer, change func(map[string]any)) answer {
	var body any
	decode := json.NewDecoder(bytes.NewReader(a.body))
	decode.UseNumber()
	if a.status >= 300 || decode.Decode(&body) != nil {
		return a
	}
	var visit func(any)
	visit = func(value any) {
		switch value := value.(type) {
		case []any:
			for _, item := range value {
				visit(item)
			}
		case map[string]any:
			for _, item := range value {
				visit(item)
			}
			change(value)
		}
	}
	visit(body)
	a.body, _ = json.Marshal(body) // it was parsed from JSON
	return a
}

// Try starts a proxy with an alteration before a rack, and calls run with the proxy's address. Some
// kinds need two calls of run at the same time, or Strangers that work meanwhile.
func Try(ctx context.Context, rack *harness.Rack, k Kind, seed uint64, run func(host string) error,
) (err error) {
	defer harness.Catch(&err)
	transport := harness.Got(harness.Transport(rack.CA))
	host := harness.Got(url.Parse(rack.URL))
	if k.room > 0 {
		quota := harness.Got(rack.Admin.State(ctx)).StorageBytes + k.room
		harness.Must(rack.Admin.Switch(ctx, map[string]any{"quota_bytes": quota}))
	}
	// Keep connections open, because a TLS handshake takes longer than most requests.
	transport.DisableKeepAlives, transport.IdleConnTimeout = false, 3*time.Second
	p := &proxy{rack: rack, host: host, next: transport, rand: rand.New(rand.NewPCG(seed, seed))}
	p.awayNext = 20 + p.rand.IntN(60)
	if k.alter == nil {
		k.alter = (*proxy).forward
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		k.alter(p, r).send(w, r)
	}))
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
// creates, changes and removes objects with names like those of a run. It returns an error if
// somebody else has changed an object. When it returns, its objects are gone.
func Strangers(ctx context.Context, rack *harness.Rack) (err error) {
	defer harness.Catch(&err)
	project := oxide.NameOrId(rack.Project)
	// The calls continue when ctx ends, so that no work stays half done.
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
