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

// These are the modes of oxide-csi-plugin.
const (
	ModeAll        = "all"
	ModeController = "controller"
	ModeNode       = "node"
)

// PluginOptions configures a driver. By default it runs in mode all, in the rack's first instance.
type PluginOptions struct {
	Mode     string
	Instance string
	// Env adds or replaces environment variables. An empty value removes a variable.
	Env  map[string]string
	Args []string
	// Command starts another driver instead of the one that the run builds.
	Command []string
	// Files are open files that the driver and the programs that it runs inherit.
	Files []*os.File
}

// Plugin is an oxide-csi-plugin process and a connection to it.
type Plugin struct {
	// Dir contains the driver's sockets, log and records.
	Dir string
	// Endpoint is the address of the driver's socket, as in CSI_ENDPOINT.
	Endpoint string
	LogFile  string
	Instance Instance
	Conn     *grpc.ClientConn

	// History records the driver's starts and kills, and calls to it. A rack's drivers share History.
	History *history.Recorder

	run     *Run
	options PluginOptions
	*process
}

// StartPlugin starts a driver that uses this rack.
func (r *Rack) StartPlugin(ctx context.Context, options PluginOptions) (plugin *Plugin, err error) {
	defer Catch(&err)
	env := map[string]string{}
	if options.Mode != ModeNode {
		env["OXIDE_HOST"], env["OXIDE_TOKEN"], env["OXIDE_PROJECT"] = r.URL, r.Token, r.Project
		env["OXIDE_CA_FILE"] = r.CA
		// After an attach that the rack did not answer, ControllerUnpublishVolume returns no OK for this
		// time. The default is longer, because a real rack may be slower than a simulated one.
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
	plugin = Got(r.run.newPlugin(r.Dir, &r.plugs, options))
	plugin.Instance, plugin.History = instance, r.History
	return plugin, plugin.Start(ctx)
}

// StartPlugin starts a driver without a simulated rack, with only the variables in the options. If
// the driver does not start, StartPlugin returns the plugin and an error, so that the caller can
// read the log.
func (r *Run) StartPlugin(ctx context.Context, options PluginOptions) (plugin *Plugin, err error) {
	defer Catch(&err)
	plugin = Got(r.newPlugin(r.Dir, &r.plugs, options))
	return plugin, plugin.Start(ctx)
}

const pluginPrefix = "plugin-"

func (r *Run) newPlugin(parent string, counter *atomic.Int64, options PluginOptions) (*Plugin,
	error) {
	options.Mode = cmp.Or(options.Mode, ModeAll)
	dir, err := r.newDir(parent, pluginPrefix, counter)
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
	}, err
}

// Start starts the driver and waits until it serves. A restarted driver has the same socket.
func (p *Plugin) Start(ctx context.Context) (err error) {
	defer Catch(&err)
	command := p.options.Command
	if command == nil {
		command = Got(p.run.command(ctx, "oxide-csi-plugin"))
	}
	command = slices.Concat(command, []string{
		"--mode=" + p.options.Mode, "--endpoint=" + p.Endpoint,
		"--metrics-address=unix://" + filepath.Join(p.Dir, "metrics.sock")}, p.options.Args)
	// Set the pprof address by a variable: an old driver in a benchmark would refuse an unknown flag.
	env := []string{"OXIDE_PPROF_ADDRESS=unix://" + filepath.Join(p.Dir, "pprof.sock")}
	for key, value := range p.options.Env {
		if value != "" {
			env = append(env, key+"="+value)
		}
	}
	// Remove a killed driver's socket, so that Dial cannot find it before the new socket exists.
	if err := os.Remove(p.Socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the old socket: %w", err)
	}
	name := "oxide-csi-plugin " + p.options.Mode
	p.process = Got(startProcess(name, p.LogFile, command, env, p.options.Files...))
	if p.Conn, err = p.Dial(ctx); err != nil {
		p.kill()
		return err
	}
	p.History.Mark(p.Lane(), "started")
	return nil
}

// Socket returns the path of the driver's socket.
func (p *Plugin) Socket() string { return filepath.Join(p.Dir, "csi.sock") }

// Dial opens another connection to the driver. It waits until the driver serves or has ended.
func (p *Plugin) Dial(ctx context.Context, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	for _, err := os.Stat(p.Socket()); err != nil; _, err = os.Stat(p.Socket()) {
		select {
		case <-p.done:
			return nil, p.ended()
		case <-ctx.Done():
			return nil, fmt.Errorf("the driver did not make its socket %s: %w\n%s",
				p.Socket(), ctx.Err(), p.tail())
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

// Kubelet returns a path below the directory that replaces kubelet's directory on this node.
func (p *Plugin) Kubelet(elements ...string) string {
	return filepath.Join(p.Dir, "kubelet", filepath.Join(elements...))
}

// Identity returns a client of the plugin's identity service.
func (p *Plugin) Identity() csi.IdentityClient { return csi.NewIdentityClient(p.Conn) }

// Controller returns a client of the plugin's controller service.
func (p *Plugin) Controller() csi.ControllerClient { return csi.NewControllerClient(p.Conn) }

// Node returns a client of the plugin's node service.
func (p *Plugin) Node() csi.NodeClient { return csi.NewNodeClient(p.Conn) }

// Signal sends a signal to the driver's process.
func (p *Plugin) Signal(signal os.Signal) error { return p.cmd.Process.Signal(signal) }

// Wait waits until the driver has ended. It returns an error if the driver failed or still runs.
func (p *Plugin) Wait() error {
	if !p.wait(StopTimeout) {
		return fmt.Errorf("%s still runs after %s", p.name, StopTimeout)
	}
	return p.err
}

// Stop ends the driver with SIGTERM. It returns an error if the driver fails or leaves a process.
func (p *Plugin) Stop() error {
	err := errors.Join(p.Conn.Close(), p.stop(), p.noneLeft())
	if err != nil {
		p.run.Failed()
	}
	return err
}

// Kill ends the driver with SIGKILL. Its mounts remain.
func (p *Plugin) Kill() {
	if p.Running() {
		p.History.Mark(p.Lane(), "killed")
	}
	_ = p.Conn.Close()
	p.kill()
}

// AwaitReady waits until the driver reports that it is ready.
func (p *Plugin) AwaitReady(ctx context.Context) error {
	return Await(ctx, StartTimeout, func() error {
		probe, err := p.Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !probe.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// GoroutineProfile returns the profile of the driver's goroutines as text.
func (p *Plugin) GoroutineProfile(ctx context.Context) ([]byte, error) {
	return p.readPage(ctx, "pprof.sock", "http://plugin/debug/pprof/goroutine?debug=1")
}

// Metrics returns the driver's metrics. The keys are names with labels, as in Prometheus' format.
func (p *Plugin) Metrics(ctx context.Context) (samples map[string]float64, err error) {
	defer Catch(&err)
	text := Got(p.readPage(ctx, "metrics.sock", "http://plugin/metrics"))
	samples = map[string]float64{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		space := strings.LastIndex(line, " ")
		if space < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		name := line[:space]
		samples[name], err = strconv.ParseFloat(line[space+1:], 64)
		Must(Wrap(err, "the metric %s", name))
	}
	return samples, nil
}

func (p *Plugin) readPage(ctx context.Context, socket, url string) (page []byte, err error) {
	defer Catch(&err)
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(p.Dir, socket))
	}
	client := &http.Client{Timeout: time.Minute,
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	resp, err := client.Do(Got(http.NewRequestWithContext(ctx, http.MethodGet, url, nil)))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	page, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, page)
	}
	return page, err
}

// ErrorRules is a client interceptor that checks each error of the driver against CSI's Error
// Scheme and this project's rules in errorFault. If an error breaks a rule, the caller gets the
// code DATA_LOSS, which no test expects, and a message that names the rule.
func ErrorRules(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, conn, append(options, grpc.Trailer(&trailer))...)
	// ErrorRules checks only errors that the driver made. An error without a trailer comes from this
	// client. An error with the text of the context's error comes from gRPC, in the client or server.
	if err == nil || len(trailer) == 0 || ended(ctx) != nil &&
		status.Convert(err).Message() == ended(ctx).Error() {
		return err
	}
	if fault := errorFault(status.Convert(err)); fault != "" {
		return status.Errorf(codes.DataLoss, "%s answered an error that %s: %v", method, fault, err)
	}
	return err
}

// ended returns ctx.Err(), or DeadlineExceeded if the deadline passed and ctx.Err() is still nil.
func ended(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil && time.Until(deadline) <= 0 {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// ReasonOf returns the reason in a driver's error, or "" for an error that gRPC itself made.
func ReasonOf(err *status.Status) string {
	match := append(reasonAndSentence.FindStringSubmatch(err.Message()), "", "")
	return match[1]
}

var reasonAndSentence = regexp.MustCompile(`^([A-Z][A-Za-z0-9]+): \S`)

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
	}
	switch s.Code() {
	case codes.Unimplemented:
		// gRPC and its generated code also answer Unimplemented, with texts that begin with no reason.
		return ""
	case codes.Unknown, codes.DataLoss:
		return "has a code that CSI does not use"
	}
	if !reasonAndSentence.MatchString(message) {
		return "does not begin with a reason and a sentence"
	}
	return ""
}

// TokenPrefix begins each token of a rack. ErrorRules rejects an error that contains TokenPrefix.
const TokenPrefix = "oxide-token-"
