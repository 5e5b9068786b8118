//go:build linux

package guest_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// TestMain turns this binary into an agent when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == guest.Verb {
		os.Exit(guest.Main(context.Background()))
	}
	namespace.Main(m)
}

func TestKillDoesNotWaitForAnInstanceThatIsDown(t *testing.T) {
	// This command stays when its agent has ended, as ssh does until it notices that the instance is
	// down.
	g, err := guest.Connect(t.Context(), []string{"sh", "-c",
		`sh -c "$0"; case $0 in *" agent;"*) sleep 1000; esac`}, guest.Config{})
	csitest.Must(t, err)
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		g.Kill()
	}()
	select {
	case <-killed:
	case <-time.After(20 * time.Second):
		t.Error("Kill has not returned after 20 s")
	}
}

func TestConnectReportsWhyACommandDoesNotReachTheInstance(t *testing.T) {
	for _, c := range []struct {
		command []string
		says    string
	}{
		{nil, "expected a command such as ssh b"},
		{[]string{"sh", "-c", "echo no route >&2; exit 255; #"}, "no route"},
		{[]string{"sh", "-c", "cat >/dev/null; echo hello; #"}, "expected the name of a directory"},
	} {
		_, err := guest.Connect(t.Context(), c.command, guest.Config{})
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("Connect(%q) = %v, want an error with %q", c.command, err, c.says)
		}
	}
}
