package keeper

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Release is set in release builds: -ldflags "-X …/keeper.Release=v1.2.3".
var Release = ""

// Main runs oxide-node-keeper with the arguments and the environment until ctx ends, and returns
// the exit status.
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
		return fmt.Errorf("how to reach Kubernetes: %w", err)
	}
	if m.Kubernetes, err = Connect(config, component+"-move"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	return m.Move(ctx, operands[0], operands[1])
}

// parse parses the flags of a command and its operands. Flags may stand between the operands.
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
