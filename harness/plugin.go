package harness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
)

// The modes of oxide-csi-plugin.
const (
	ModeAll        = "all"
	ModeController = "controller"
	ModeNode       = "node"
)

// PluginOptions configures a driver. The zero value serves all in the rack's first instance.
type PluginOptions struct {
	// Mode is ModeAll when empty.
	Mode string
	// Instance names the instance in whose guest a node's driver runs. Empty is the first one.
	Instance string
	// Env overrides the variables that the harness sets. An empty value removes the variable.
	Env map[string]string
	// Args are further arguments.
	Args []string
	// Command starts a driver that was built elsewhere. If it is empty, the run's is started.
	Command []string
	// Files are open files that the driver and its programs inherit.
	Files []*os.File
}

// Plugin is a running oxide-csi-plugin and a connection to it.
type Plugin struct {
	// Dir contains the plugin's socket and log.
	Dir string
	// Endpoint is the socket's address in the form of CSI_ENDPOINT.
	Endpoint string
	// LogFile is the path of the log. The node service's records are in volumes beside it.
	LogFile string
	// Instance is the instance of the rack in which the plugin runs.
	Instance Instance
	// Conn is a connection to the plugin. Controller, Node and Identity use it.
	Conn *grpc.ClientConn

	// History records the driver's calls, starts and ends. The drivers of a rack share the rack's.
	History *history.Recorder

	run     *Run
	options PluginOptions
	proc    *process
}

// StartPlugin starts the driver for this rack.
func (r *Rack) StartPlugin(ctx context.Context, options PluginOptions) (*Plugin, error) {
	env := map[string]string{}
	if options.Mode != ModeNode {
		env["OXIDE_HOST"], env["OXIDE_TOKEN"], env["OXIDE_PROJECT"] = r.URL, r.Token, r.Project
		env["OXIDE_CA_FILE"] = r.CA
		// A simulated rack delays less than a real one. With the driver's default limit, a proof that
		// loses the answer to an attach would wait long at the detach.
		env["OXIDE_LATE_LIMIT"] = "100ms"
	}
	var instance Instance
	if options.Mode != ModeController {
		instance = r.Instance(options.Instance)
		env["OXIDE_SYSFS_ROOT"] = filepath.Join(instance.Guest, "sys")
		env["OXIDE_DEV_ROOT"] = filepath.Join(instance.Guest, "dev")
	}
	maps.Copy(env, options.Env)
	options.Env = env
	plugin, err := r.run.newPlugin(r.Dir, &r.plugs, options)
	if err != nil {
		return nil, err
	}
	plugin.Instance, plugin.History = instance, r.History
	return plugin, plugin.Start(ctx)
}

// StartPlugin starts a driver without a simulated rack. The driver's environment is exactly
// the one of the options. If the driver does not start, the plugin is returned all the same,
// so that the caller can read its log.
func (r *Run) StartPlugin(ctx context.Context, options PluginOptions) (*Plugin, error) {
	plugin, err := r.newPlugin(r.Dir, &r.plugs, options)
	if err != nil {
		return nil, err
	}
	return plugin, plugin.Start(ctx)
}

// pluginPrefix begins the name of a plugin's directory, which ends with a number.
const pluginPrefix = "plugin-"

// newPlugin prepares a driver with exactly the environment of the options.
func (r *Run) newPlugin(parent string, counter *atomic.Int64, options PluginOptions) (*Plugin,
	error) {
	options.Mode = cmp.Or(options.Mode, ModeAll)
	dir, err := r.newDir(parent, pluginPrefix, counter)
	if err != nil {
		return nil, err
	}
	env := map[string]string{}
	if options.Mode != ModeController {
		env["OXIDE_STATE_DIR"] = filepath.Join(dir, "volumes")
	}
	maps.Copy(env, options.Env)
	options.Env = env
	return &Plugin{
		Dir: dir, Endpoint: "unix://" + filepath.Join(dir, "csi.sock"),
		LogFile: filepath.Join(dir, options.Mode+".log"),
		History: &history.Recorder{}, run: r, options: options,
	}, nil
}

// Start starts the driver again after Stop or Kill, at the same socket, and waits until it serves.
func (p *Plugin) Start(ctx context.Context) error {
	command := p.options.Command
	if command == nil {
		var err error
		if command, err = p.run.command(ctx, "oxide-csi-plugin"); err != nil {
			return err
		}
	}
	command = slices.Concat(command, []string{
		"--mode=" + p.options.Mode, "--endpoint=" + p.Endpoint,
		"--metrics-address=unix://" + filepath.Join(p.Dir, "metrics.sock")}, p.options.Args)
	// The address is a variable, because an older driver of a benchmark may not have the flag.
	env := []string{"OXIDE_PPROF_ADDRESS=unix://" + filepath.Join(p.Dir, "pprof.sock")}
	for key, value := range p.options.Env {
		if value != "" {
			env = append(env, key+"="+value)
		}
	}
	// Dial would take the socket of a killed process for the socket of this one.
	err := os.Remove(p.Socket())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the old socket: %w", err)
	}
	name := "oxide-csi-plugin " + p.options.Mode
	p.proc, err = startProcess(name, p.LogFile, command, env, p.options.Files...)
	if err != nil {
		return err
	}
	if p.Conn, err = p.Dial(ctx); err != nil {
		p.proc.kill()
		return err
	}
	p.History.Mark(p.Lane(), "started")
	return nil
}

// Socket returns the path of the driver's socket.
func (p *Plugin) Socket() string { return filepath.Join(p.Dir, "csi.sock") }

// Dial makes another connection to the plugin. It waits until the plugin serves, or has ended.
func (p *Plugin) Dial(ctx context.Context, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	for {
		if _, err := os.Stat(p.Socket()); err == nil {
			break
		}
		select {
		case <-p.proc.done:
			return nil, p.proc.ended()
		case <-ctx.Done():
			return nil, fmt.Errorf("the driver did not make its socket %s: %w\n%s",
				p.Socket(), ctx.Err(), p.proc.tail())
		case <-time.After(5 * time.Millisecond):
		}
	}
	options = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithChainUnaryInterceptor(p.record, ErrorRules),
	}, options...)
	conn, err := grpc.NewClient(p.Endpoint, options...)
	if err != nil {
		return nil, fmt.Errorf("connect to the driver: %w", err)
	}
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			return nil, errors.Join(fmt.Errorf("connect to the driver at %s: %w",
				p.Endpoint, ctx.Err()), conn.Close())
		}
	}
	return conn, nil
}

// Kubelet returns a path of the orchestrator on the plugin's node.
func (p *Plugin) Kubelet(elements ...string) string {
	return filepath.Join(p.Dir, "kubelet", filepath.Join(elements...))
}

// Identity returns a client of the plugin's identity service.
func (p *Plugin) Identity() csi.IdentityClient { return csi.NewIdentityClient(p.Conn) }

// Controller returns a client of the plugin's controller service.
func (p *Plugin) Controller() csi.ControllerClient { return csi.NewControllerClient(p.Conn) }

// Node returns a client of the plugin's node service.
func (p *Plugin) Node() csi.NodeClient { return csi.NewNodeClient(p.Conn) }

// PID returns the process ID of the driver.
func (p *Plugin) PID() int { return p.proc.pid() }

// Running reports whether the process still runs.
func (p *Plugin) Running() bool { return p.proc.running() }

// Signal sends a signal to the process.
func (p *Plugin) Signal(signal os.Signal) error { return p.proc.cmd.Process.Signal(signal) }

// Wait waits until the process has ended, and returns an error if it failed or still runs.
func (p *Plugin) Wait() error {
	if !p.proc.wait(StopTimeout) {
		return fmt.Errorf("%s still runs after %s", p.proc.name, StopTimeout)
	}
	return p.proc.err
}

// Stop ends the plugin with SIGTERM. It fails if the plugin fails or leaves a process.
func (p *Plugin) Stop() error {
	err := errors.Join(p.Conn.Close(), p.proc.stop(), p.proc.noneLeft())
	if err != nil {
		p.run.Failed()
	}
	return err
}

// Kill ends the plugin with SIGKILL. The plugin's mounts stay.
func (p *Plugin) Kill() {
	if p.Running() {
		p.History.Mark(p.Lane(), "killed")
	}
	_ = p.Conn.Close()
	p.proc.kill()
}

// AwaitReady waits until the driver is ready. It has finished its first requests and is idle.
func (p *Plugin) AwaitReady(ctx context.Context) error {
	return Await(ctx, StartTimeout, func() error {
		probe, err := p.Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !probe.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// GoroutineProfile returns the stacks of the plugin's goroutines, as text.
func (p *Plugin) GoroutineProfile(ctx context.Context) ([]byte, error) {
	return p.readPage(ctx, "pprof.sock", "http://plugin/debug/pprof/goroutine?debug=1")
}

// Metrics returns the plugin's metrics by their names with labels, as Prometheus prints them.
func (p *Plugin) Metrics(ctx context.Context) (map[string]float64, error) {
	text, err := p.readPage(ctx, "metrics.sock", "http://plugin/metrics")
	if err != nil {
		return nil, err
	}
	samples := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		space := strings.LastIndex(line, " ")
		if space < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		name := line[:space]
		if samples[name], err = strconv.ParseFloat(line[space+1:], 64); err != nil {
			return nil, fmt.Errorf("the metric %s: %w", name, err)
		}
	}
	return samples, nil
}

// readPage reads a page of the plugin's server at a Unix socket, and keeps no connection open.
func (p *Plugin) readPage(ctx context.Context, socket, url string) ([]byte, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(p.Dir, socket))
	}
	client := &http.Client{Timeout: time.Minute,
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", req.URL, resp.Status, page)
	}
	return page, err
}

// ErrorRules is a client interceptor that checks every error of the driver against CSI's Error
// Scheme and against our own rules (errorFault). If an error breaks a rule, the caller gets
// DATA_LOSS, a code that no test expects, with a message that describes the fault.
func ErrorRules(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(options, grpc.Trailer(&trailer))...)
	// A server's error consists of a trailer alone. An error without a trailer was made by this
	// client: the connection was lost, or the deadline passed, which can happen in the middle of a
	// good response. The deadline can also pass after the server has sent its error and before
	// this client reads it, or while gRPC in the server still reads the request. Then gRPC in the
	// server answers, and its timer may be earlier than the timer of this client.
	if err == nil || len(trailer) == 0 || ended(ctx) != nil &&
		status.Convert(err).Message() == ended(ctx).Error() {
		return err
	}
	if fault := errorFault(status.Convert(err)); fault != "" {
		return status.Errorf(codes.DataLoss, "%s answered an error that %s: %v", method, fault, err)
	}
	return err
}

// ended returns ctx.Err, also if the deadline has passed but its timer has not run yet.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && time.Until(deadline) <= 0 {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// ReasonOf returns the reason of a driver's error, or "" for an error of gRPC itself.
func ReasonOf(err *status.Status) string {
	match := append(reasonAndSentence.FindStringSubmatch(err.Message()), "", "")
	return match[1]
}

// reasonAndSentence matches a message's reason for programs and its sentence for people.
var reasonAndSentence = regexp.MustCompile(`^([A-Z][A-Za-z0-9]+): \S`)

// errorFault describes what is wrong with an error of the driver, or returns "".
func errorFault(s *status.Status) string {
	message := s.Message()
	switch {
	case len(s.Details()) > 0:
		return fmt.Sprintf("carries details, which must stay empty (%v)", s.Details())
	case strings.TrimSpace(message) == "":
		return "has no message"
	case strings.ContainsAny(message, "\n\r"):
		return "has a message of several lines"
	case strings.Contains(message, TokenPrefix):
		return "shows the rack's token"
	case strings.Contains(message, Canary):
		return "shows what the caller must keep to itself"
	}
	switch s.Code() {
	case codes.Unimplemented:
		// gRPC itself and the generated code answer this code, with texts of their own.
		return ""
	case codes.Unknown, codes.DataLoss:
		return "has a code that CSI does not use"
	}
	if !reasonAndSentence.MatchString(message) {
		return "does not begin with a reason and a sentence"
	}
	return ""
}

// Every token of a rack begins with TokenPrefix. The specs put Canary into every secret, mount flag
// and token that they pass. No error and no log may contain either text.
const (
	TokenPrefix = "oxide-token-"
	Canary      = "tweetytweety"
)
