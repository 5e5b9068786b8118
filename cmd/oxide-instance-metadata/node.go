package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/rest"
)

// providerPrefix is what the Oxide cloud controller manager puts before an instance's UUID.
const providerPrefix = "oxide://"

// How long one question to the API server may take, and how long to wait before the next.
const (
	askTimeLimit = 10 * time.Second
	askInterval  = 2 * time.Second
)

// node is one node of the cluster, as its API server tells of it.
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
		return nil, errors.New("the address of the Kubernetes API is none: expected " +
			"https://host:port of KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT")
	}
	config = rest.CopyConfig(config)
	config.Timeout = askTimeLimit
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("no way to the Kubernetes API: %w", err)
	}
	// Its token goes to the API server and nowhere else.
	client.CheckRedirect = func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}
	return &node{
		Name: name, URL: server.JoinPath("api", "v1", "nodes", name).String(), Client: client,
		Interval: askInterval, Log: io.Discard,
	}, nil
}

// instance is the UUID of the node's instance. It waits for one that is not known yet, and says for
// what.
func (n *node) instance(ctx context.Context, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	said := ""
	for {
		providerID, err := n.providerID(ctx)
		if err == nil {
			return instanceOf(n.Name, providerID)
		}
		var later notYet
		if !errors.As(err, &later) {
			return "", err
		}
		// A question that is cut off by the end of the wait says less than the one before it.
		if said == "" || ctx.Err() == nil && later.text != said {
			said = later.text
			_, _ = fmt.Fprintf(n.Log, "waiting up to %s: %s\n", timeout, said)
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return "", fmt.Errorf("told to end while waiting: %s", said)
			}
			return "", fmt.Errorf("waited %s (--timeout): %s", timeout, said)
		case <-time.After(n.Interval):
		}
	}
}

// notYet is a state that may pass.
type notYet struct{ text string }

func (e notYet) Error() string { return e.text }

// providerID asks the API server once.
func (n *node) providerID(ctx context.Context) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, n.URL, nil)
	if err != nil {
		return "", fmt.Errorf("%s does not name a node: %w", nodeNameKey, err)
	}
	request.Header.Set("Accept", "application/json")
	response, err := n.Client.Do(request)
	if err != nil {
		return "", notYet{"the Kubernetes API does not answer: " + reasonOf(err)}
	}
	defer func() { _ = response.Body.Close() }()
	// A node of many images and volumes has some hundred KiB.
	const most = 16 << 20
	var found struct {
		Message string `json:"message"`
		Spec    struct {
			ProviderID string `json:"providerID"`
		} `json:"spec"`
	}
	err = json.NewDecoder(io.LimitReader(response.Body, most)).Decode(&found)
	if response.StatusCode != http.StatusOK {
		return "", n.refusal(response.StatusCode, found.Message)
	}
	if err != nil {
		return "", notYet{"the Kubernetes API's answer is cut off or no JSON"}
	}
	if found.Spec.ProviderID == "" {
		return "", notYet{fmt.Sprintf("node %s has no spec.providerID; the Oxide cloud controller "+
			"manager sets it, or the kubelet's --provider-id", n.Name)}
	}
	return found.Spec.ProviderID, nil
}

// refusal is what an answer other than the node means.
func (n *node) refusal(code int, message string) error {
	switch code {
	case http.StatusNotFound:
		return fmt.Errorf("the cluster has no node %q; %s has to be the name of the Node object",
			n.Name, nodeNameKey)
	case http.StatusForbidden:
		return errors.New(`the pod's service account may not read nodes; bind it to a ClusterRole ` +
			`with the rule apiGroups: [""], resources: ["nodes"], verbs: ["get"]`)
	case http.StatusUnauthorized:
		return errors.New("the Kubernetes API does not accept the token of the pod's service " +
			"account; delete the pod for a new one")
	case http.StatusTooManyRequests:
		return notYet{"the Kubernetes API has too many requests"}
	}
	text := fmt.Sprintf("the Kubernetes API answers with status %d", code)
	if line := oneLine(message); line != "" {
		text += ": " + line
	}
	if code >= http.StatusInternalServerError {
		return notYet{text}
	}
	return errors.New(text)
}

// instanceOf takes the instance's UUID out of spec.providerID, in the one form that is written.
func instanceOf(name, providerID string) (string, error) {
	text, ours := strings.CutPrefix(providerID, providerPrefix)
	if !ours {
		return "", fmt.Errorf("spec.providerID of node %s is %q, of another cloud; expected "+
			"%s and an instance's UUID", name, oneLine(providerID), providerPrefix)
	}
	const length = 36 // with hyphens; uuid.Parse takes others too
	id, err := uuid.Parse(text)
	if err != nil || len(text) != length || id == uuid.Nil {
		return "", fmt.Errorf("spec.providerID of node %s is %q; expected %s and an instance's UUID",
			name, oneLine(providerID), providerPrefix)
	}
	return id.String(), nil
}

// reasonOf is what went wrong on the way, without the address that every such error begins with.
func reasonOf(err error) string {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return oneLine(err.Error())
}

// oneLine is the beginning of foreign text, fit for a log.
func oneLine(text string) string {
	const most = 200
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
