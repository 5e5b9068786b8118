// Command oxide-instance-metadata writes the ID of a Kubernetes node's instance to a file, for
// nodes whose SMBIOS is hidden. It takes the ID from the Node's spec.providerID, which the Oxide
// cloud controller manager sets, and writes it as OXIDE_INSTANCE_ID. The command runs in an init
// container of the driver's pod, so that the driver itself needs no Kubernetes client.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/rest"
)

const nodeNameKey = "K8S_NODE_NAME"

// Release is set in release builds: -ldflags "-X main.Release=v1.2.3".
var Release = ""

var nodeName = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Getenv, rest.InClusterConfig, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "oxide-instance-metadata:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, getenv func(string) string,
	configure func() (*rest.Config, error), stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("oxide-instance-metadata", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	out := flags.String("out", "/data/config.env", "the `file` to write")
	timeout := flags.Duration("timeout", 5*time.Minute,
		"how long to wait for a node that has no spec.providerID yet")
	version := flags.Bool("version", false, "print the version and end")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		_, _ = fmt.Fprintf(stderr, "oxide-instance-metadata writes the instance of the Kubernetes "+
			"node in %s to a file.\n", nodeNameKey)
		flags.SetOutput(stderr)
		flags.PrintDefaults()
		return nil
	case err != nil:
		return fmt.Errorf("%w; see --help", err)
	case flags.NArg() > 0:
		return fmt.Errorf("expected flags only, found %q; see --help", flags.Arg(0))
	case *version:
		_, err := fmt.Fprintln(stdout, cmp.Or(Release, "devel"))
		return err
	case *timeout <= 0:
		return fmt.Errorf("--timeout is %s; it has to be positive", *timeout)
	}
	name := getenv(nodeNameKey)
	switch {
	case name == "":
		return fmt.Errorf("%s is not set: set it to the node's name, with a fieldRef to spec.nodeName",
			nodeNameKey)
	case !nodeName.MatchString(name):
		return fmt.Errorf("%s is %q, which is not a node's name: expected lower-case letters, digits, "+
			"dots and hyphens", nodeNameKey, oneLine(name))
	}
	config, err := configure()
	if err != nil {
		return fmt.Errorf("cannot reach the Kubernetes API: %w; run this in a pod whose service "+
			"account's token is mounted", err)
	}
	node, err := newNode(config, name)
	if err != nil {
		return err
	}
	node.Log = stderr
	id, err := node.instance(ctx, *timeout)
	if err != nil {
		return err
	}
	if err := write(*out, id); err != nil {
		return fmt.Errorf("write %s (--out): %w", *out, err)
	}
	_, err = fmt.Fprintf(stderr, "node %s is instance %s; wrote %s\n", name, id, *out)
	return err
}

// write creates the file atomically. The value is in single quotes: the kubelet accepts no other
// form in the file of a fileKeyRef.
func write(path, id string) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(file, "OXIDE_INSTANCE_ID='%s'\n", id)
	// The driver runs as another user, and has to read the file.
	err = cmp.Or(err, file.Chmod(0o644), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		_ = os.Remove(file.Name())
	}
	return err
}

// providerPrefix precedes the instance's UUID in provider IDs of Oxide's cloud controller manager.
const providerPrefix = "oxide://"

const (
	askTimeLimit = 10 * time.Second
	askInterval  = 2 * time.Second
)

type node struct {
	Name     string
	URL      string
	Client   *http.Client
	Interval time.Duration
	Log      io.Writer
}

func newNode(config *rest.Config, name string) (*node, error) {
	server, err := url.Parse(config.Host)
	if err != nil || server.Host == "" {
		return nil, errors.New("the address of the Kubernetes API is invalid: expected " +
			"https://host:port from KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT")
	}
	config = rest.CopyConfig(config)
	config.Timeout = askTimeLimit
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the Kubernetes API: %w", err)
	}
	// A redirect must not carry the token to another server.
	client.CheckRedirect = func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}
	return &node{
		Name: name, URL: server.JoinPath("api", "v1", "nodes", name).String(), Client: client,
		Interval: askInterval, Log: io.Discard,
	}, nil
}

// instance waits until the Node has a spec.providerID, and returns the UUID in it.
func (n *node) instance(ctx context.Context, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	said := ""
	for {
		providerID, later, err := n.providerID(ctx)
		switch {
		case err != nil:
			return "", err
		case later == "":
			return instanceOf(n.Name, providerID)
		}
		// If the timeout canceled the request, keep the earlier reason, which is more useful.
		if said == "" || ctx.Err() == nil && later != said {
			said = later
			_, _ = fmt.Fprintf(n.Log, "waiting up to %s: %s\n", timeout, said)
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return "", fmt.Errorf("stopped while waiting: %s", said)
			}
			return "", fmt.Errorf("waited %s (--timeout): %s", timeout, said)
		case <-time.After(n.Interval):
		}
	}
}

// providerID reads spec.providerID once. If it finds none, but a later read may find one, it
// returns the reason as the result "later", and no error.
func (n *node) providerID(ctx context.Context) (id, later string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, n.URL, nil)
	if err != nil {
		return "", "", fmt.Errorf("%s does not name a node: %w", nodeNameKey, err)
	}
	request.Header.Set("Accept", "application/json")
	response, err := n.Client.Do(request)
	if err != nil {
		return "", "the Kubernetes API does not answer: " + reasonOf(err), nil
	}
	defer func() { _ = response.Body.Close() }()
	// most limits the response. A Node with many images and volumes has a few hundred KiB.
	const most = 16 << 20
	var found struct {
		Message string `json:"message"`
		Spec    struct {
			ProviderID string `json:"providerID"`
		} `json:"spec"`
	}
	err = json.NewDecoder(io.LimitReader(response.Body, most)).Decode(&found)
	switch {
	case response.StatusCode != http.StatusOK:
		later, err = n.refusal(response.StatusCode, found.Message)
	case err != nil:
		later, err = "the response of the Kubernetes API is truncated or not JSON", nil
	case found.Spec.ProviderID == "":
		later = fmt.Sprintf("node %s has no spec.providerID; the Oxide cloud controller manager sets "+
			"it, or the kubelet's --provider-id", n.Name)
	}
	return found.Spec.ProviderID, later, err
}

func (n *node) refusal(code int, message string) (later string, err error) {
	switch code {
	case http.StatusNotFound:
		return "", fmt.Errorf("the cluster has no node %q; %s has to be the name of the Node object",
			n.Name, nodeNameKey)
	case http.StatusForbidden:
		return "", errors.New(`the pod's service account may not read nodes; bind it to a ClusterRole ` +
			`with the rule apiGroups: [""], resources: ["nodes"], verbs: ["get"]`)
	case http.StatusUnauthorized:
		return "", errors.New("the Kubernetes API does not accept the token of the pod's service " +
			"account; delete the pod for a new one")
	case http.StatusTooManyRequests:
		return "the Kubernetes API has too many requests", nil
	}
	text := strings.TrimSuffix(fmt.Sprintf("the Kubernetes API answers with status %d: %s", code,
		oneLine(message)), ": ")
	if code >= http.StatusInternalServerError {
		return text, nil
	}
	return "", errors.New(text)
}

func instanceOf(name, providerID string) (string, error) {
	text, ours := strings.CutPrefix(providerID, providerPrefix)
	if !ours {
		return "", fmt.Errorf("spec.providerID of node %s is %q, of another cloud; expected "+
			"%s and an instance's UUID", name, oneLine(providerID), providerPrefix)
	}
	const length = 36 // with hyphens; uuid.Parse also accepts other forms
	id, err := uuid.Parse(text)
	if err != nil || len(text) != length || id == uuid.Nil {
		return "", fmt.Errorf("spec.providerID of node %s is %q; expected %s and an instance's UUID",
			name, oneLine(providerID), providerPrefix)
	}
	return id.String(), nil
}

// reasonOf returns the text of a transport error without the address.
func reasonOf(err error) string {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return oneLine(err.Error())
}

// oneLine returns the beginning of untrusted text as one line for a log.
func oneLine(text string) string {
	const most = 200
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
