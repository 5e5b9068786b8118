// Package kube is Kubernetes for the programs of an operator: it runs the user's
// kubectl, and parses what kubectl get -o json prints. The driver itself never speaks to
// Kubernetes.
//
// An Object has only the fields that these programs read: no Secret, no environment of a container
// and no annotation of anybody else. The doctor reads mount options in order to remove them.
package kube

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Kubectl runs kubectl with the user's configuration and returns what it prints. An error holds the
// last line of what kubectl said.
func Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	return KubectlInput(ctx, nil, args...)
}

// Pinned returns KubectlInput for the context that is the current one now, whatever another shell
// selects meanwhile. Within a cluster there is none to select.
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
		// Before its own words kubectl may print what its library logs.
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		return nil, fmt.Errorf("kubectl %s: %w: %s", args[0], err, csierr.Plain(lines[len(lines)-1]))
	}
	return stdout.Bytes(), nil
}

// nameLooks is the form of a name in Kubernetes. It never looks like a flag of kubectl's.
var nameLooks = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// IsName reports whether a text may be the name of an object.
func IsName(text string) bool { return len(text) <= 253 && nameLooks.MatchString(text) }
