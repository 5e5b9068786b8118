package driver

import (
	"cmp"
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The intervals at which the controller checks whether the rack accepts it; the shorter one follows
// a check that found a fault.
const (
	rackCheckInterval   = time.Minute
	rackRecheckInterval = 5 * time.Second
	rackCheckTimeout    = 10 * time.Second
)

// rackHealth checks in the background whether the rack accepts the token and shows the project, so
// that Probe never waits.
type rackHealth struct {
	Rack   *rack.Client
	Tokens *rack.TokenSource // nil: no token file to check
	Log    *slog.Logger

	// asked requests a check before the interval ends.
	asked chan struct{}

	mu sync.Mutex
	// guarded by mu
	known rackKnown
	// askedExpiry is when expires was read; only run uses it.
	askedExpiry time.Time
}

// rackKnown is what the checks have found out.
type rackKnown struct {
	checked bool
	fault   error
	// reported is the reason of the last line in the log.
	reported string
	reached  bool // by the last check
	answered bool // by any check
	// unanswered is why the rack has never answered, nil if it has.
	unanswered error
	// expires is the zero time if no token expires, or the rack does not report it.
	expires time.Time
}

func (h *rackHealth) now() rackKnown {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known
}

const expiryInterval = time.Hour

// readExpiry reads when the first of the user's tokens expires. It is no fault if the rack does not
// report the time.
func (h *rackHealth) readExpiry(ctx context.Context) {
	if time.Since(h.askedExpiry) < expiryInterval {
		return
	}
	h.askedExpiry = time.Now()
	var first time.Time
	err := h.Rack.EachToken(ctx, func(token *oxide.DeviceAccessToken) {
		// A token that has expired is not the token in use.
		if at := token.TimeExpires; at != nil && at.After(time.Now()) &&
			(first.IsZero() || at.Before(first)) {
			first = *at
		}
	})
	if err != nil {
		h.Log.DebugContext(ctx, "the rack does not report when tokens expire", "error",
			csierr.Message(err))
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known.expires = first
}

// checkSoon requests a check, after the rack refused the token of a call. It does not wait.
func (h *rackHealth) checkSoon() {
	select {
	case h.asked <- struct{}{}:
	default:
	}
}

func (h *rackHealth) run(ctx context.Context) {
	for {
		wait := rackCheckInterval
		if !h.guardedCheck(ctx) {
			wait = rackRecheckInterval
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-h.soon():
			timer.Stop()
		}
	}
}

// soon returns the channel of requested checks, or nil after a check that failed: a hundred refused
// calls cause one check.
func (h *rackHealth) soon() <-chan struct{} {
	if h.now().fault != nil {
		return nil
	}
	return h.asked
}

func (h *rackHealth) guardedCheck(ctx context.Context) (fine bool) {
	err := async.Guard(ctx, h.Log, "the rack check", func() error {
		fine = h.check(ctx)
		return nil
	})
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.known.checked, h.known.fault = true, err
	}
	return fine
}

func (h *rackHealth) check(ctx context.Context) bool {
	limited, cancel := context.WithTimeout(ctx, rackCheckTimeout)
	defer cancel()
	_, err := h.Rack.LookAtWorld(limited)
	if ctx.Err() != nil {
		return true
	}
	if err == nil {
		h.readExpiry(limited)
	}
	fault, fileFault := healthFault(err), h.Tokens.Fault()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.report(limited, err, cmp.Or(fault, fileFault))
	known := &h.known
	known.reached = err == nil
	known.answered = known.answered || err == nil || fault != nil
	if known.unanswered = nil; !known.answered {
		known.unanswered = err
	}
	if err != nil && fault == nil && known.checked {
		// The rack cannot be reached, so the last result stays valid (PR-5).
		return false
	}
	known.checked, known.fault = true, fault
	return err == nil && fileFault == nil
}

// report logs one line when the result of a check differs from the one before. The caller holds mu.
func (h *rackHealth) report(ctx context.Context, err, fault error) {
	why := fault
	if why == nil {
		why = err
	}
	trouble := csierr.Message(why)
	// The text may have a request id, which differs each time, so compare only the reason.
	told := string(csierr.ReasonOf(why))
	switch {
	case told == h.known.reported:
	case fault != nil && err == nil:
		h.Log.ErrorContext(ctx, "the rack accepts the token, but its file cannot be read again", "error",
			trouble)
	case fault != nil:
		h.Log.ErrorContext(ctx, "the rack does not accept this controller", "error", trouble)
	case err != nil:
		h.Log.WarnContext(ctx, "the rack at OXIDE_HOST does not answer; calls fail until it does",
			"error", trouble)
	default:
		h.Log.InfoContext(ctx, "the rack accepts this controller again")
	}
	h.known.reported = told
}

// healthFault returns the fault that a person has to repair, or nil. A rack that cannot be reached
// is no such fault.
func healthFault(err error) error {
	switch reason := csierr.ReasonOf(err); reason {
	case csierr.TokenRejected, csierr.RoleMissing, csierr.ProjectChanged:
		return csierr.Coded(codes.FailedPrecondition, reason, "%w", err)
	case csierr.ProjectNotFound:
		return csierr.New(csierr.ProjectNotFound, "this token sees no project with the name or id in "+
			"OXIDE_PROJECT; create it, or give the token's user a role on it")
	}
	return nil
}

func (h *rackHealth) state() (ready bool, err error) {
	fileFault, now := h.Tokens.Fault(), h.now()
	return now.checked, cmp.Or(now.fault, fileFault)
}

func toolsHealth() error {
	if missing := filesystem.MissingTools(); len(missing) > 0 {
		return csierr.New(csierr.ToolsMissing, "the node service runs %s and cannot find it; install "+
			"e2fsprogs, xfsprogs, btrfs-progs and util-linux", strings.Join(missing, ", "))
	}
	return nil
}

type identityService struct {
	csi.UnimplementedIdentityServer

	// Topology reports whether the operator set a topology. Controller and nodes have to agree.
	Topology bool
	// Health reports whether the process is ready, or returns an error that a person has to repair. It
	// must not wait for the rack. Nil means always ready.
	Health func() (ready bool, err error)
	// Waiting returns a sentence about what a healthy process has waited for since it started, or "".
	// Nil means that it waits for nothing.
	Waiting func() string
}

// waitingTrailer is the key of the metadata in which an answer to Probe contains what the process
// waits for. CSI's answer has no field for it: if Probe answered "not ready", a CO would start
// nothing and show no reason, and if it answered an error, a supervisor might restart the plugin.
// It ends in -bin because a sentence need not be ASCII.
const waitingTrailer = "oxide-csi-waiting-bin"

// GetPluginInfo returns the driver's name and version.
func (i *identityService) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (
	*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: volume.DriverName, VendorVersion: Version()}, nil
}

// GetPluginCapabilities lists what the plugin as a whole supports. CSI wants the same answer from
// every process, so a node lists CONTROLLER_SERVICE too.
//
// Group snapshots, snapshot metadata and expansion are missing because the rack does not support
// them.
func (i *identityService) GetPluginCapabilities(context.Context,
	*csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	types := []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}
	if i.Topology {
		types = append(types, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	var list []*csi.PluginCapability
	for _, t := range types {
		list = append(list, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: t},
		}})
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: list}, nil
}

// Probe reports whether this process is ready. It makes no call, so it may be called at any rate.
// An outage of the rack is no reason to restart the plugin. A refused token and missing programs
// are errors, because a person has to repair them.
func (i *identityService) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse,
	error) {
	ready := true
	if i.Health != nil {
		var err error
		if ready, err = i.Health(); err != nil {
			return nil, err
		}
	}
	if i.Waiting != nil {
		if why := i.Waiting(); why != "" {
			// SetTrailer fails only outside of a gRPC call, where nobody reads the trailer.
			_ = grpc.SetTrailer(ctx, metadata.Pairs(waitingTrailer, why))
		}
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}
