package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

type csiServer struct {
	Identity   csi.IdentityServer
	Controller csi.ControllerServer // nil: not served
	Node       csi.NodeServer       // nil: not served
	Log        *slog.Logger

	metrics *metrics
	hidden  *hidden
	flight  flightRecorders
}

// serve serves until ctx ends. Then it waits for the calls in progress and removes the socket.
func (s *csiServer) serve(ctx context.Context, listener net.Listener) error {
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(s.interceptors()...),
		// A client that connects and sends nothing must not delay the shutdown for long.
		grpc.ConnectionTimeout(5*time.Second),
		grpc.WaitForHandlers(true),
	)
	csi.RegisterIdentityServer(server, s.Identity)
	if s.Controller != nil {
		csi.RegisterControllerServer(server, s.Controller)
	}
	if s.Node != nil {
		csi.RegisterNodeServer(server, s.Node)
	}
	drained := make(chan struct{})
	stop := async.AfterDone(ctx, s.Log, "shutdown of the server", func() {
		defer close(drained)
		s.Log.Info("draining in-flight calls")
		server.GracefulStop()
	})
	err := server.Serve(listener)
	if !stop() {
		<-drained
	}
	if err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve CSI: %w", err)
	}
	return nil
}

// Run runs the plugin until ctx ends. If it fails before it serves, the plugin is misconfigured,
// and the error is one line with the variable's name.
func Run(ctx context.Context, c Config, logTo io.Writer) error {
	p := plugin{config: c, metrics: newMetrics()}
	p.log = newLog(c, &p.hidden, logTo)
	defer p.close()
	server, err := p.assemble()
	if err != nil {
		return err
	}
	for _, beside := range []struct {
		setting, address string
		listen           func(address string) (net.Listener, error)
		serve            func(context.Context, net.Listener) error
	}{
		{"OXIDE_METRICS_ADDRESS (--metrics-address)", c.MetricsAddress, listenPages,
			servePages(p.log, "metrics", p.metrics.pages())},
		{"OXIDE_PPROF_ADDRESS (--pprof-address)", c.PprofAddress, listenPages,
			servePages(p.log, "profiles", profiles())},
		{"OXIDE_LIVENESS_ENDPOINT (--liveness-endpoint)", c.LivenessEndpoint, listenEndpoint,
			p.liveness().serve},
	} {
		if beside.address == "" {
			continue
		}
		at, err := beside.listen(beside.address)
		if err != nil {
			return fmt.Errorf("%s: %w", beside.setting, err)
		}
		defer func() { _ = at.Close() }()
		serve := func(ctx context.Context) error { return beside.serve(ctx, at) }
		p.background = append(p.background, serve)
	}
	listener, err := listenEndpoint(c.Endpoint)
	if err != nil {
		return fmt.Errorf("CSI_ENDPOINT (--endpoint): %w", err)
	}
	p.log.Info("serving", c.startFields()...)
	if c.Mode.controller() {
		for _, warning := range c.rackWarnings() {
			p.log.Warn(warning)
		}
		if _, isID := rack.ID(c.Project); !isID {
			p.log.Warn("OXIDE_PROJECT is a name: after a restart, another project that has got the name, " +
				"or one at another OXIDE_HOST, would be taken for it; set the project's id")
		}
	}
	if c.Mode.node() {
		// Serve nevertheless: volumes can be unmounted without these programs. Probe returns the error.
		if err := toolsHealth(); err != nil {
			p.log.Error("this node cannot stage volumes", "error", csierr.Message(err))
		}
	}
	return p.serve(ctx, server, listener)
}

type plugin struct {
	config  Config
	log     *slog.Logger
	metrics *metrics
	hidden  hidden

	health *rackHealth // nil without a controller
	stop   func()      // ends calls that wait for long reads; nil without a node
	closes []func()
	// These functions run until the last calls have ended.
	background []func(context.Context) error
}

func (p *plugin) close() {
	for _, f := range p.closes {
		f()
	}
}

func (p *plugin) assemble() (*csiServer, error) {
	c := p.config
	server := &csiServer{
		Identity: &identityService{Topology: c.declaresTopology(), Health: p.state, Waiting: p.waiting},
		Log:      p.log,
		metrics:  p.metrics,
		hidden:   &p.hidden,
		flight:   flightRecorders{controller: &flight.Recorder{Log: p.log, Observe: p.metrics.change}},
	}
	if c.Mode.controller() {
		controller, err := p.controller()
		if err != nil {
			return nil, err
		}
		server.Controller = controller
	}
	if c.Mode.node() {
		node, err := p.node()
		if err != nil {
			return nil, err
		}
		server.Node = node
		server.flight.node = &flight.Recorder{Log: p.log, Observe: p.metrics.change}
		if c.StateDir != "" {
			server.flight.node.Dir = filepath.Join(c.StateDir, flight.DirName)
		}
		server.flight.instance = node.InstanceID
		p.metrics.watchNode(node)
		p.stop = node.Close
		p.closes = append(p.closes, node.Close)
	}
	return server, nil
}

// liveness returns the server for a supervisor that restarts a process if its Probe fails. The
// Probe succeeds as long as the process works, because a restart repairs no token, no rack and no
// missing program.
func (p *plugin) liveness() *csiServer {
	return &csiServer{Identity: &identityService{Topology: p.config.declaresTopology()},
		Log: p.log.With("socket", "liveness"), metrics: p.metrics, hidden: &p.hidden}
}

func (p *plugin) controller() (*controller.Service, error) {
	c := p.config
	tokens := tokensOf(c, &p.hidden, p.log)
	p.health = &rackHealth{Tokens: tokens, Log: p.log, asked: make(chan struct{}, 1)}
	client, closeIdle, err := rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens,
		Observe: p.metrics.request, Refused: p.health.checkSoon})
	if err != nil {
		return nil, err
	}
	client.LookLimit = c.LookLimit
	p.health.Rack = client
	p.metrics.watchRack(p.health)
	p.closes = append(p.closes, closeIdle)
	return &controller.Service{
		Rack: client, ClusterID: c.ClusterID, Topology: c.Topology,
		TopologyInstance: c.TopologyInstance, MaxDisks: c.MaxDisks, LateLimit: c.LateLimit,
		Log: p.log,
	}, nil
}

func (p *plugin) node() (*node.Service, error) {
	c := p.config
	id, err := node.InstanceID(node.Identity{
		Explicit: c.InstanceID, MetadataFile: c.InstanceMetadataFile, SysfsRoot: c.SysfsRoot,
	})
	if err != nil {
		return nil, err
	}
	node := &node.Service{
		SysfsRoot: c.SysfsRoot, DevRoot: c.DevRoot, InstanceID: id, MaxDisks: c.MaxDisks,
		DeviceTimeout: c.DeviceTimeout, StateDir: c.StateDir, Topology: c.nodeTopology(id), Log: p.log,
	}
	if err := node.OpenState(); err != nil {
		return nil, fmt.Errorf("OXIDE_STATE_DIR (--state-dir): %w", err)
	}
	return node, nil
}

func (p *plugin) state() (ready bool, err error) {
	if p.config.Mode.node() {
		if err := toolsHealth(); err != nil {
			return false, err
		}
	}
	if p.health != nil {
		return p.health.state()
	}
	return true, nil
}

func (p *plugin) waiting() string {
	if p.health == nil {
		return ""
	}
	// An outage after the first answer is not reported (PR-5).
	why := p.health.now().unanswered
	if why == nil {
		return ""
	}
	return "the rack at OXIDE_HOST has not answered since the plugin started: " +
		p.hidden.text(csierr.Message(why))
}

func (p *plugin) serve(ctx context.Context, server *csiServer, csiAt net.Listener) error {
	background, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var work async.Group
	if p.health != nil {
		work.Go(func() { p.health.run(background) })
	}
	for _, do := range p.background {
		work.Go(func() {
			err := async.Guard(background, p.log, "a server beside CSI's",
				func() error { return do(background) })
			if err != nil {
				p.log.Error("a server beside CSI's failed", "error", err)
			}
		})
	}
	if p.stop != nil {
		defer async.AfterDone(ctx, p.log, "shutdown of reads", p.stop)()
	}
	err := server.serve(ctx, csiAt)
	cancel()
	work.Wait()
	p.log.Info("ended")
	return err
}

func newLog(c Config, secrets *hidden, to io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: c.LogLevel, ReplaceAttr: secrets.attribute}
	if c.LogJSON {
		return slog.New(slog.NewJSONHandler(to, options))
	}
	return slog.New(slog.NewTextHandler(to, options))
}

// socketMode gives access to the socket's owner and group: kubelet and the sidecars.
const socketMode = 0o660

// socketPath parses an endpoint. CSI allows only Unix sockets, with a name that ends in .sock.
func socketPath(endpoint string) (string, error) {
	expected := errors.New("has to be unix:///path/name.sock, an absolute path after three slashes")
	u, err := url.Parse(endpoint)
	switch {
	case err != nil, u.Scheme != "unix", u.Host != "", u.Opaque != "", u.User != nil, u.RawQuery != "",
		u.Fragment != "", !filepath.IsAbs(u.Path), !strings.HasPrefix(endpoint, "unix:///"):
		return "", expected
	case !strings.HasSuffix(u.Path, ".sock"):
		return "", errors.New("has to end in .sock, such as unix:///path/csi.sock, so that no other " +
			"file is taken for a socket")
	}
	path := filepath.Clean(u.Path)
	// The kernel's sun_path has 108 bytes with its NUL.
	if len(path) > 107 {
		return "", fmt.Errorf("has a path of %d bytes; a socket's has at most 107", len(path))
	}
	return path, nil
}

func listenEndpoint(endpoint string) (net.Listener, error) {
	path, err := socketPath(endpoint)
	if err != nil {
		return nil, err
	}
	return listenUnix(path)
}

// listenUnix creates the socket, and no other file in its directory, which belongs to the
// supervisor. First it removes a socket that a killed process has left, but neither a socket whose
// process still answers nor a file of another kind.
func listenUnix(path string) (net.Listener, error) {
	unlock, err := lockDirectory(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	// With this umask the kernel creates the socket with its final mode, so others never have access.
	// No goroutine creates other files meanwhile, because serving has not begun.
	old := syscall.Umask(0o777 &^ socketMode)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	syscall.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("create the socket: %w", csierr.WithoutPath(err))
	}
	listener.SetUnlinkOnClose(false)
	info, err := os.Lstat(path)
	if err != nil {
		_ = listener.Close()
		return nil, fmt.Errorf("stat the socket: %w", csierr.WithoutPath(err))
	}
	return &ownSocket{UnixListener: listener, path: path, info: info}, nil
}

// ownSocket removes its file when it is closed, unless another process has replaced the file.
type ownSocket struct {
	*net.UnixListener
	path string
	info os.FileInfo
}

// Close removes the file if it still has the socket's inode number, and stops listening. No other
// file gets that number while the socket is open.
func (s *ownSocket) Close() error {
	if unlock, err := lockDirectory(filepath.Dir(s.path)); err == nil {
		defer unlock()
		if info, err := os.Lstat(s.path); err == nil && os.SameFile(info, s.info) {
			_ = os.Remove(s.path)
		}
	}
	return s.UnixListener.Close()
}

// lockDirectory keeps other processes of the driver from creating or removing a socket in dir until
// unlock() is called. Without it, two processes that start at the same time may each remove the
// other's new socket as stale. The lock is on the directory itself and leaves no file in it.
func lockDirectory(dir string) (unlock func(), err error) {
	const maxWait = 2 * time.Second
	held, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil, errors.New("the socket's directory does not exist; the supervisor has to create it")
	case err != nil:
		return nil, fmt.Errorf("open the socket's directory: %w", csierr.WithoutPath(err))
	}
	// flock(2) has no time limit, so poll.
	backoff := async.Backoff{Pause: 5 * time.Millisecond, Max: 5 * time.Millisecond,
		End: time.Now().Add(maxWait)}
	for {
		err := syscall.Flock(int(held.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = held.Close() }, nil
		case !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR):
			_ = held.Close()
			return nil, fmt.Errorf("lock the socket's directory: %w", err)
		}
		if again, _ := backoff.Wait(context.Background()); !again {
			_ = held.Close()
			return nil, fmt.Errorf("another process has been starting there for %s; stop it first", maxWait)
		}
	}
}

func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("stat an old socket: %w", csierr.WithoutPath(err))
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is no socket exists at the socket's path; remove it")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		_ = conn.Close()
		return errors.New("another process serves there; stop it first")
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("check whether another process serves there: %w", csierr.WithoutPath(err))
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove a stale socket: %w", csierr.WithoutPath(err))
	}
	return nil
}
