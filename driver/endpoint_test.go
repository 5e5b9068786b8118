package driver

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func TestB18OnlyAbsoluteUnixSocketsAreEndpoints(t *testing.T) { // B-17
	for _, bad := range []string{
		"", "unix://csi/csi.sock", "unix:/csi/csi.sock", "unix:csi.sock", "/csi/csi.sock",
		"csi.sock",
		"tcp://127.0.0.1:9000", "unix:///csi/csi", "unix:///csi/csi.socket", "unix://host/csi.sock",
		"unix:///csi/csi.sock?x=y", "unix:///csi/csi.sock#x", "http:///csi.sock",
		"unix://u@/csi.sock",
		"unix:///" + strings.Repeat("x", 120) + ".sock", "unix:///a\x00.sock", "unix:///%zz.sock",
	} {
		if path, err := socketPath(bad); err == nil {
			t.Errorf("socketPath(%q) = %q", bad, path)
		}
	}
	path, err := socketPath("unix:///csi/csi.sock")
	if err != nil || path != "/csi/csi.sock" {
		t.Errorf("got %q, %v", path, err)
	}
}

// names lists a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestB19NothingButASocketIsRemoved(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "csi.sock")
	must(t, os.WriteFile(path, []byte("precious"), 0o600))
	if _, err := listenUnix(path); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("got %v", err)
	}
	if content, err := os.ReadFile(path); string(content) != "precious" {
		t.Errorf("the file now holds %q, %v", content, err)
	}
	_, err := listenUnix(filepath.Join(dir, "nowhere", "csi.sock"))
	if err == nil || !strings.Contains(err.Error(), "directory") || strings.Contains(err.Error(),
		dir) {
		t.Errorf("a missing directory: %v", err)
	}
}

func TestB19OfManyProcessesThatStartAtOnceOneServes(t *testing.T) {
	for range 50 {
		path := filepath.Join(t.TempDir(), "csi.sock")
		left, err := listenUnix(path)
		must(t, err)
		// A stale socket, which all of them try to remove.
		abandon(left)
		servers := startAtOnce(t, path, 16)
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatalf("%d serve, and nobody answers: %v", len(servers), err)
		}
		_ = conn.Close()
		if len(servers) != 1 {
			t.Fatalf("%d of them serve at one socket", len(servers))
		}
		_ = servers[0].Close()
		if got := names(t, filepath.Dir(path)); len(got) != 0 {
			t.Fatalf("left behind: %v", got)
		}
	}
}

// abandon closes a listener and leaves its socket.
func abandon(listener net.Listener) {
	_ = listener.(*ownSocket).UnixListener.Close()
}

// startAtOnce makes that many try to serve, and returns the listeners of those who may.
func startAtOnce(t *testing.T, path string, many int) []net.Listener {
	t.Helper()
	var mu sync.Mutex
	var servers []net.Listener
	var all sync.WaitGroup
	start := make(chan struct{})
	for range many {
		all.Go(func() {
			<-start
			listener, err := listenUnix(path)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				servers = append(servers, listener)
			case !strings.Contains(err.Error(), "another process"):
				t.Errorf("one that may not serve says %v", err)
			}
		})
	}
	close(start)
	all.Wait()
	return servers
}

func TestB19AProcessThatEndsLeavesItsSuccessorsSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	old, err := listenUnix(path)
	must(t, err)
	// The old socket is removed, and another process starts.
	must(t, os.Remove(path))
	successor, err := listenUnix(path)
	must(t, err)
	_ = old.Close()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the successor's socket is gone: %v", err)
	}
	_ = conn.Close()
	_ = successor.Close()
}

func TestTheWaitForALockedSocketDirectoryIsShort(t *testing.T) {
	dir := t.TempDir()
	held, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { _ = held.Close() })
	must(t, syscall.Flock(int(held.Fd()), syscall.LOCK_EX))
	_, err = listenUnix(filepath.Join(dir, "csi.sock"))
	if err == nil || !strings.Contains(err.Error(), "another process has been starting there") {
		t.Errorf("got %v", err)
	}
}
