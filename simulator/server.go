package simulator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
)

// Server is an Oxide rack on one machine. The zero value serves one, in a directory of its own
// that goes when it is closed. Its fields are set before the first request.
type Server struct {
	// Dir is where the rack lives; what was there when the last one ended is there again.
	Dir string
	// Projects exist from the start; nil is one, "default". The first has the Instances.
	Projects  []string
	Instances []Instance
	Images    []Image
	// Token is the only one that is let in; "" lets in every oxide-token-.
	Token string
	// ColdPlug makes it one of today's racks, which attach and detach only while the instance is
	// stopped (A17).
	ColdPlug bool
	// QuotaBytes is the silo's storage, 64 TiB when 0; DiskLimit the disks of an instance, 12.
	QuotaBytes int64
	DiskLimit  int
	// Role is what the token's bearer may do in the projects; "" is adminapi.RoleCollaborator.
	Role string
	// DeviceDelay is how long after its attach a device shows in the guest. CreateHold and
	// SnapshotHold hold those requests open, as the rack's sagas do. InstanceDelay is how long an
	// instance takes to start, stop or reboot.
	DeviceDelay, CreateHold, SnapshotHold, InstanceDelay time.Duration
	// FreeDelay makes deletion soft, as it will be in a coming release: a disk or a snapshot is gone
	// when its DELETE is answered, and its bytes and its share of the quota are freed that much
	// later. With 0 they are freed first, as on the racks of today (A68).
	FreeDelay time.Duration
	// Seed decides in which order and under which numbers devices appear.
	Seed uint64
	// Log tells what the rack does; nil is slog.Default.
	Log *slog.Logger
	// FirstLoop is the lowest number of a loop device that the rack takes. In a container whose
	// /dev has only the nodes of its start, the low ones are needed by others.
	FirstLoop int
	// ProcRoot is a procfs that shows the processes of all guests, to find the mounts that are
	// frozen while a snapshot is taken; "" is /proc.
	ProcRoot string
	// KeepDevices leaves the disks with their guests when the rack is closed, as the end of a rack's
	// control plane does. The next one that opens Dir adopts them.
	KeepDevices bool
	// Faults are what goes wrong on purpose.
	Faults Faults

	opening   sync.Once
	openError error
	temporary bool
	log       *slog.Logger
	store     *store.Store
	plane     *dataplane.Plane
	switches  switchboard
	requests  requestLog
	locks     keylock.Map
	creating  pending
	repairs   repairs
	later     later
	// life ends when the server closes; work is what is still under way then.
	life context.Context
	die  context.CancelFunc
	work sync.WaitGroup

	mu sync.Mutex
	// mu guards closed and keeps it from changing while work is added.
	closed bool
}

// Instance is one that the rack has from the start. An ID that is not given is derived from the
// names of project and instance, so it is the same on every machine.
type Instance struct {
	Name, ID string
	// Project is the first one of the Server when empty.
	Project string
	Stopped bool
}

// Image is one that the rack has from the start, with the content of File or, without one,
// SizeBytes of zeroes. Without a Project it is the silo's.
type Image struct {
	Name, Project string
	SizeBytes     int64
	BlockSize     int
	File          string
}

var errClosed = errors.New("the simulator is closed")

// Open makes the rack ready: it reads the directory, finishes or takes back what an earlier
// simulator left half done, and gives the running instances their devices. The first request
// opens a server that nobody has opened.
func (s *Server) Open(ctx context.Context) error {
	s.opening.Do(func() { s.openError = s.open(ctx) })
	return s.openError
}

func (s *Server) open(ctx context.Context) (err error) {
	s.log = orDefault(s.Log, slog.Default())
	s.life, s.die = context.WithCancel(context.WithoutCancel(ctx))
	if _, err := s.switches.change(func(now *adminapi.Switches) error {
		*now = s.initialSwitches()
		return nil
	}); err != nil {
		return fmt.Errorf("start a rack: %w", err)
	}
	if s.Dir == "" {
		if s.Dir, err = os.MkdirTemp("", "oxide-simulator-"); err != nil {
			return fmt.Errorf("start a rack: %w", err)
		}
		s.temporary = true
	}
	if s.Dir, err = filepath.Abs(s.Dir); err != nil {
		return fmt.Errorf("start a rack: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start a rack in %s: %w", s.Dir, err), s.release())
		}
	}()
	if err := prepareDir(s.Dir); err != nil {
		return err
	}
	if s.store, err = store.Open(filepath.Join(s.Dir, recordsFile)); err != nil {
		return err
	}
	if s.plane, err = dataplane.Open(dataplane.Config{Dir: s.Dir, Log: s.log, Seed: s.Seed,
		FirstLoop: s.FirstLoop, ProcRoot: s.ProcRoot}); err != nil {
		return err
	}
	return s.restore(ctx)
}

// Close ends the rack: it waits for the work that is under way, cutting its delays short, and
// gives every device back. What was acknowledged is in Dir.
func (s *Server) Close() error {
	s.opening.Do(func() { s.openError = errClosed })
	s.mu.Lock()
	wasClosed := s.closed
	s.closed = true
	s.mu.Unlock()
	if s.openError == nil && !wasClosed {
		s.die()
		s.work.Wait()
		return s.release()
	}
	return nil // there is nothing, or nothing any more
}

func (s *Server) release() error {
	s.die()
	var errs []error
	switch {
	case s.plane != nil && s.KeepDevices:
		s.plane.Stop()
	case s.plane != nil:
		errs = append(errs, s.plane.Close())
	}
	if s.store != nil {
		errs = append(errs, s.store.Close())
	}
	if s.temporary {
		errs = append(errs, os.RemoveAll(s.Dir))
	}
	return errors.Join(errs...)
}

// begin notes that work is under way, unless the server is closed.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.work.Add(1)
	return true
}

// background does work that outlives its request; Close waits for it.
func (s *Server) background(work func()) {
	if !s.begin() {
		return
	}
	go func() {
		defer s.work.Done()
		work()
	}()
}

// Requests lists the calls that the rack has answered.
func (s *Server) Requests() []adminapi.Request { return s.requests.since(0) }

// GuestDir is where an instance's guest view lies, with sys and dev in it. Like a request it opens
// a server that nobody has opened; one that cannot be opened has no guests, and "" for an answer.
func (s *Server) GuestDir(instanceID string) string {
	if s.Open(context.Background()) != nil {
		return ""
	}
	return s.plane.GuestDir(instanceID)
}

// ServeHTTP serves the rack's API.
func (s *Server) ServeHTTP(w http.ResponseWriter, hr *http.Request) {
	r := newRequest(hr)
	if err := s.Open(context.WithoutCancel(hr.Context())); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if !s.begin() {
		http.Error(w, errClosed.Error(), http.StatusServiceUnavailable)
		return
	}
	a := func() answer {
		defer s.work.Done()
		a := s.handle(r)
		s.record(r, a)
		return a
	}()
	s.write(w, r, a)
}

// handle carries a request out. A caller that gives up does not stop it (A18).
func (s *Server) handle(r *request) answer {
	if err := r.find(); err != nil {
		return newAnswer(r.id, 0, nil, err)
	}
	parseErr := r.parse()
	if err := s.draw(r); err != nil {
		return s.fail(r, err)
	}
	if a, ended := s.interfere(r, adminapi.Before); ended {
		return a
	}
	if parseErr != nil {
		return newAnswer(r.id, 0, nil, parseErr)
	}
	if err := s.authenticate(r); err != nil {
		return newAnswer(r.id, 0, nil, err)
	}
	if a, ended := s.interfere(r, adminapi.Instead); ended {
		return a
	}
	if f := r.deferred(); f != nil {
		s.carryOutLater(r, time.Duration(f.Delay))
		a, _ := s.interfere(r, adminapi.Deferred)
		return a
	}
	a := r.dropped(s.serve(r))
	for _, f := range r.faults {
		if f.Phase == adminapi.Twice {
			a = r.dropped(s.serve(r))
		}
	}
	for _, phase := range []adminapi.Phase{adminapi.Unwind, adminapi.Reread, adminapi.Twice,
		adminapi.After} {
		if lie, ended := s.interfere(r, phase); ended {
			return lie
		}
	}
	return a
}

func (s *Server) serve(r *request) answer {
	if r.op.serve == nil {
		err := unimplemented(r.op)
		s.log.Error("the simulator lacks an operation", slog.String("error", err.Error()))
		return newAnswer(r.id, 0, nil, err)
	}
	status, body, err := r.op.serve(s, r)
	if err != nil {
		return s.fail(r, err)
	}
	return newAnswer(r.id, status, body, nil)
}

// fail answers with an error; one that no rule of the rack explains is logged, for the caller is
// not told more than "Internal Server Error".
func (s *Server) fail(r *request, err error) answer {
	var known *apiError
	if !errors.As(err, &known) {
		s.log.Error("a request failed", slog.String("operation", r.entry.Operation),
			slog.String("request_id", r.id), slog.String("error", err.Error()))
	}
	return newAnswer(r.id, 0, nil, err)
}

// record writes the request into the logs, before its caller has the answer.
func (s *Server) record(r *request, a answer) {
	r.entry.Time = r.started.UTC()
	r.entry.Status = a.status
	r.entry.DurationMS = float64(time.Since(r.started).Microseconds()) / 1000
	if r.entry.Faults == nil {
		r.entry.Faults = []string{}
	}
	s.requests.add(r.entry)
	s.log.Debug("request", slog.String("operation", r.entry.Operation),
		slog.String("method", r.entry.Method), slog.String("path", r.entry.Path),
		slog.String("object", r.entry.Object), slog.Int("status", a.status),
		slog.Float64("duration_ms", r.entry.DurationMS), slog.String("request_id", r.id))
}
