// Package kube runs the user's kubectl for the operator's commands, and parses what kubectl get -o
// json prints. The driver itself never speaks to Kubernetes.
//
// An Object contains only the fields that these commands read: no Secret, no environment of a
// container, and no annotations of other programs. The doctor reads mount options to remove them.
package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Kubectl runs kubectl with the user's configuration and returns what it prints. An error contains
// the last line of kubectl's standard error.
func Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	return KubectlInput(ctx, nil, args...)
}

// Pinned returns KubectlInput for the current context, even if the user selects another one later.
// In a pod there are no contexts.
func Pinned(ctx context.Context) func(ctx context.Context, stdin []byte, args ...string) ([]byte,
	error) {
	name, err := Kubectl(ctx, "config", "current-context")
	if err != nil {
		return KubectlInput
	}
	pin := "--context=" + strings.TrimSpace(string(name))
	return func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
		return KubectlInput(ctx, stdin, append(slices.Clone(args), pin)...)
	}
}

// KubectlInput is Kubectl with a standard input. kubectl does not outlive this process.
func KubectlInput(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	// kubectl may run plugins, which must not see the rack's token.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(entry string) bool {
		return strings.HasPrefix(entry, "OXIDE_")
	})
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := runMortal(cmd); err != nil {
		// kubectl may print log lines of its library before its error.
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		return nil, fmt.Errorf("kubectl %s: %w: %s", args[0], err, csierr.Plain(lines[len(lines)-1]))
	}
	return stdout.Bytes(), nil
}

// nameLooks is the form of a name in Kubernetes. It never looks like a flag of kubectl's.
var nameLooks = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// IsName reports whether a text may be the name of an object.
func IsName(text string) bool { return len(text) <= 253 && nameLooks.MatchString(text) }

// kinds contains the known kinds. Parse returns no fields of others, such as a Secret.
var kinds = []string{"PersistentVolume", "PersistentVolumeClaim", "VolumeAttachment", "CSINode",
	"Node", "Pod", "Event", "VolumeSnapshot", "VolumeSnapshotContent", "DaemonSet", "ReplicaSet",
	"Deployment"}

// errIncomplete does not quote the decoder, whose error contains values.
var errIncomplete = errors.New("is not the complete output of kubectl get -o json, or a field " +
	"has another type; repeat the command and keep all of its output")

// Parse parses the output of kubectl get -o json: one object, or a list. A list that is truncated,
// or one page of a longer one, is an error.
func Parse(data []byte) ([]Object, error) {
	var list struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Continue           string `json:"continue"`
			RemainingItemCount int64  `json:"remainingItemCount"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	// Data after the object is an error too: two concatenated lists are not one.
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, errIncomplete
	}
	element, isList := strings.CutSuffix(list.Kind, "List")
	switch {
	case !isList:
		o, err := parseObject(data, list.Kind)
		return []Object{o}, err
	case list.Metadata.Continue != "" || list.Metadata.RemainingItemCount > 0:
		return nil, errors.New("is one page of a longer list")
	case list.Items == nil:
		return nil, errors.New("is a list without items")
	}
	objects := make([]Object, 0, len(list.Items))
	for _, item := range list.Items {
		o, err := parseObject(item, element)
		if err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// parseObject parses an object, which is of the given kind if it names none.
func parseObject(data []byte, kind string) (Object, error) {
	var o struct {
		Kind string `json:"kind"`
	}
	err := json.Unmarshal(data, &o)
	if o.Kind != "" {
		kind = o.Kind
	}
	known := Object{Kind: kind}
	if err == nil && slices.Contains(kinds, kind) {
		err = json.Unmarshal(data, &known)
		known.Kind = kind
	}
	if err != nil {
		return Object{}, errIncomplete
	}
	return known, nil
}
