package keeper

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Release is set in release builds: -ldflags "-X …/keeper.Release=v1.2.3".
var Release = ""

// Main runs oxide-node-keeper until ctx ends, and returns the exit status.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) int {
	err := mainErr(ctx, args, getenv, stdout, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "%s: %v\n", component, err)
		return 1
	}
	return 0
}

func mainErr(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "leave":
			return mainLeave(ctx, args[1:], getenv, stdout, stderr)
		case "move":
			return mainMove(ctx, args[1:], stdout)
		}
	}
	s, err := ParseSettings(args, getenv, stdout)
	if err != nil {
		return err
	}
	if s.Version {
		_, err := fmt.Fprintln(stdout, cmp.Or(Release, "devel"))
		return err
	}
	var handler slog.Handler = slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel})
	if s.LogJSON {
		handler = slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel})
	}
	log := slog.New(handler)
	klog.SetSlogLogger(log) // so client-go's log lines have the same form
	return Run(ctx, s, log)
}

func mainLeave(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer) error {
	l := Leaver{NodeName: getenv("K8S_NODE_NAME")}
	flags := flag.NewFlagSet(component+" leave", flag.ContinueOnError)
	flags.StringVar(&l.Socket, "socket", "/leaving/leave.sock", "the socket that the driver waits at")
	flags.DurationVar(&l.Limit, "timeout", 100*time.Second, "how long to wait for the volumes")
	kubeconfig := flags.String("kubeconfig", "", "a kubeconfig `file`, outside a cluster")
	switch _, err := parse(flags, args, stdout, 0); {
	case err != nil:
		return err
	case l.NodeName == "":
		return errors.New("K8S_NODE_NAME is not set: set it with a fieldRef to spec.nodeName")
	case l.Limit <= 0:
		return fmt.Errorf("--timeout is %s; it has to be positive", l.Limit)
	}
	config, err := kubernetesConfig(*kubeconfig)
	if err != nil {
		return err
	}
	if l.Kubernetes, err = Connect(config, component+"-leave"); err != nil {
		return err
	}
	l.Log = slog.New(slog.NewTextHandler(stderr, nil))
	return l.Run(ctx)
}

func mainMove(ctx context.Context, args []string, stdout io.Writer) error {
	m := Mover{Out: stdout, Pace: pace}
	flags := flag.NewFlagSet(component+" move", flag.ContinueOnError)
	timeout := flags.Duration("timeout", 2*time.Minute, "how long to wait for Kubernetes")
	kubeconfig := flags.String("kubeconfig", "", "a `file`; empty: $KUBECONFIG, ~/.kube/config, or "+
		"the pod's service account")
	operands, err := parse(flags, args, stdout, 2)
	if err != nil {
		return err
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = *kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return fmt.Errorf("read how to reach Kubernetes: %w", err)
	}
	if m.Kubernetes, err = Connect(config, component+"-move"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	return m.Move(ctx, operands[0], operands[1])
}

// parse parses flags and operands in any order. want is the number of operands.
func parse(flags *flag.FlagSet, args []string, help io.Writer, want int) (operands []string,
	err error) {
	flags.SetOutput(io.Discard)
	for more := true; more; {
		switch err := flags.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			_, _ = fmt.Fprintln(help, about)
			_, _ = fmt.Fprintf(help, "\nFlags of %s:\n", flags.Name())
			flags.SetOutput(help)
			flags.PrintDefaults()
			return nil, err
		case err != nil:
			return nil, fmt.Errorf("%w; see --help", err)
		}
		if more = flags.NArg() > 0; more {
			operands, args = append(operands, flags.Arg(0)), flags.Args()[1:]
		}
	}
	if len(operands) != want {
		return nil, fmt.Errorf("%s: expected %d arguments beside flags, found %d; see --help",
			flags.Name(), want, len(operands))
	}
	return operands, nil
}

// Run takes part in the leader election until ctx ends. It does the keeper's work while it leads,
// and serves metrics.
func Run(ctx context.Context, s Settings, log *slog.Logger) error {
	config, err := kubernetesConfig(s.Kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 20, 40
	client, err := Connect(config, component)
	if err != nil {
		return err
	}
	s.Rack.UserAgent = component
	racks, closeIdle, err := rack.New(s.Rack, &rack.Transport{Tokens: &rack.TokenSource{
		Fixed: s.Token, Path: s.TokenFile, Log: log}})
	if err != nil {
		return err
	}
	defer closeIdle()
	racks.LookLimit = s.roundLimit()
	// A restarted container has the same host name, so the keeper keeps its lease.
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read the host name, which identifies this replica in the lease: %w", err)
	}
	p := &process{settings: s, name: name, keeper: &Keeper{Config: s.Config, Kubernetes: client,
		Rack: racks, Log: log, Metrics: NewMetrics(), Namespace: s.LeaseNamespace}}
	stop, err := p.serve()
	if err != nil {
		return err
	}
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	var starting async.Group
	defer starting.Wait()
	defer cancel()
	starting.Go(func() { p.startStopped(ctx) })
	for ctx.Err() == nil {
		if err := p.candidacy(ctx); err != nil {
			return err
		}
	}
	return nil
}

func kubernetesConfig(path string) (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if path != "" {
		config, err = clientcmd.BuildConfigFromFlags("", path)
	}
	if err != nil {
		return nil, fmt.Errorf("read how to reach Kubernetes: %w; run this in a pod whose service "+
			"account's token is mounted, or set --kubeconfig", err)
	}
	return config, nil
}

type process struct {
	keeper   *Keeper
	settings Settings
	name     string // of this replica, in the lease
	elector  atomic.Pointer[leaderelection.LeaderElector]
}

func (p *process) candidacy(ctx context.Context) error {
	lease := p.settings.LeaseDuration
	// OnStartedLeading runs in a goroutine of its own, and may begin after the leadership has ended.
	var leading sync.Mutex
	aside := false // guarded by leading
	candidacy, stepAside := context.WithCancel(ctx)
	defer stepAside()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: component, Namespace: p.settings.LeaseNamespace},
			Client:     p.keeper.Kubernetes.Coordination,
			LockConfig: resourcelock.ResourceLockConfig{Identity: p.name},
		},
		LeaseDuration: lease, RenewDeadline: p.settings.roundLimit(), RetryPeriod: lease * 2 / 15,
		ReleaseOnCancel: true, Name: component,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				leading.Lock()
				defer leading.Unlock()
				if ctx.Err() != nil {
					return
				}
				p.keeper.Log.InfoContext(ctx, "leading")
				if aside = p.lead(ctx); aside {
					stepAside()
				}
			},
			OnStoppedLeading: func() { p.keeper.Log.Info("not leading") },
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	p.elector.Store(elector)
	elector.Run(candidacy)
	leading.Lock()
	defer leading.Unlock()
	if aside {
		// Give another replica the time to notice that the lease is free.
		p.keeper.Log.InfoContext(ctx, "stepping aside, so that another replica stops this keeper's node")
		pause(ctx, 2*lease)
	}
	return nil
}

func (p *process) lead(ctx context.Context) (aside bool) {
	var watching async.Group
	defer watching.Wait()
	defer p.keeper.Metrics.rest()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed := make(chan struct{}, 1)
	watching.Go(func() { p.watch(ctx, changed) })
	for ctx.Err() == nil {
		again, err := p.round(ctx)
		p.keeper.Metrics.round(err)
		if errors.Is(err, ErrStepAside) {
			return true
		}
		if err != nil && ctx.Err() == nil {
			p.keeper.Log.ErrorContext(ctx, "round failed; the next one tries again", "error", err)
		}
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-changed:
			// Changes often come together; wait a moment to handle them in one round.
			pause(ctx, min(again, 200*time.Millisecond))
		}
		timer.Stop()
	}
	return false
}

// round does one round. Its time limit ends before another replica can take the lease, even if this
// process is frozen meanwhile.
func (p *process) round(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, p.settings.roundLimit())
	defer cancel()
	return p.keeper.Round(ctx)
}

// roundLimit limits the time of a round, and the time from a read to a change that depends on it.
func (s *Settings) roundLimit() time.Duration { return s.LeaseDuration * 2 / 3 }

// startStopped calls StartStopped until ctx ends. It needs no lease: without the API server no
// replica leads, so nobody else starts the instances.
func (p *process) startStopped(ctx context.Context) {
	for ctx.Err() == nil {
		if err := p.keeper.StartStopped(ctx); err != nil && ctx.Err() == nil {
			p.keeper.Log.ErrorContext(ctx, "an instance could not be started; trying again", "error", err)
		}
		pause(ctx, pace)
	}
}

// watch reports changes of VolumeAttachments that need a new round. It ignores all others, because
// a round is expensive: a cluster may have many attachments that do not wait for a stop, or that
// belong to other drivers.
func (p *process) watch(ctx context.Context, changed chan<- struct{}) {
	for ctx.Err() == nil {
		w, err := p.keeper.Kubernetes.Storage.VolumeAttachments().Watch(ctx, metav1.ListOptions{})
		if err != nil {
			pause(ctx, p.keeper.Config.Interval)
			continue
		}
		waited := map[string]bool{}
		for event := range w.ResultChan() {
			if !matters(event, waited) {
				continue
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
		pause(ctx, pace)
	}
}

// matters reports whether an attachment begins to wait for a stop, or no longer waits. It updates
// the map waited, which contains the names of the waiting attachments. No other change needs an
// extra round: during an operation there is a round every second.
func matters(event watch.Event, waited map[string]bool) bool {
	object, ok := event.Object.(*storagev1.VolumeAttachment)
	if !ok {
		return false
	}
	waits := event.Type != watch.Deleted && object.Spec.Attacher == DriverName &&
		(&attachment{VolumeAttachment: object}).waits()
	before := waited[object.Name]
	if delete(waited, object.Name); waits {
		waited[object.Name] = true
	}
	return waits != before
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

func (p *process) serve() (stop func(), err error) {
	if p.settings.HTTPEndpoint == "" {
		return func() {}, nil
	}
	listener, err := net.Listen("tcp", p.settings.HTTPEndpoint)
	if err != nil {
		return nil, fmt.Errorf("--http-endpoint: %w", err)
	}
	server := &http.Server{Handler: p.handler(), ReadHeaderTimeout: 10 * time.Second}
	async.Detach(func() { _ = server.Serve(listener) })
	return func() { _ = server.Close() }, nil
}

func (p *process) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(p.keeper.Metrics.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if e := p.elector.Load(); e != nil {
			if err := e.Check(p.settings.LeaseDuration); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	return mux
}
