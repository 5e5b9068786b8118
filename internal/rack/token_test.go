//go:build linux

package rack

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// hungMount replaces the file at path by one whose filesystem hangs until letGo is called.
func hungMount(t *testing.T, path string) (letGo func()) {
	t.Helper()
	dir := t.TempDir()
	fuse := csitest.Got(unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
	must(t, unix.Mount("fuse", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)))
	letGo = sync.OnceFunc(func() {
		_ = unix.Close(fuse)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	t.Cleanup(letGo)
	must(t, os.Symlink(filepath.Join(dir, "token"), path+".new"))
	must(t, os.Rename(path+".new", path))
	return letGo
}

// blocked contains functions that replace the file at path by one on which reads block until letGo
// is called.
var blocked = map[string]func(t *testing.T, path string) (letGo func()){
	"a FIFO that nobody writes to": fifo,
	"a FIFO whose writer is silent": func(t *testing.T, path string) func() {
		letGo := fifo(t, path)
		writer := csitest.Got(os.OpenFile(path, os.O_RDWR, 0))(t)
		t.Cleanup(func() { _ = writer.Close() })
		return letGo
	},
	"a mount that hangs": hungMount,
}

func fifo(t *testing.T, path string) (letGo func()) {
	must(t, unix.Mkfifo(path+".new", 0o600))
	must(t, os.Rename(path+".new", path))
	return func() {}
}

func TestABlockedTokenFileDoesNotBlockCalls(t *testing.T) { // D-63
	for name, block := range blocked {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "token")
			writeToken(t, path, "one")
			s := tokenFile(path)
			if token, err := s.get(t.Context(), false); token != "one" || err != nil {
				t.Fatalf("got %q, %v", token, err)
			}
			must(t, s.Fault())
			letGo := block(t, path)
			start := time.Now()
			var callers sync.WaitGroup
			for range 50 {
				callers.Go(func() {
					for _, force := range []bool{false, true} {
						if token, err := s.get(t.Context(), force); token != "one" || err != nil {
							t.Errorf("got %q, %v, want the last token", token, err)
						}
					}
				})
			}
			callers.Wait()
			for range 100 {
				_, _ = s.get(t.Context(), false)
			}
			if took := time.Since(start); took > 20*s.Limit {
				t.Errorf("the callers waited for %s", took)
			}
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			readers := strings.Count(string(stacks), "renewedFile[...]).readFile(")
			if hangs := name == "a mount that hangs"; readers > 1 || hangs && readers == 0 {
				t.Errorf("%d goroutines read the file", readers)
			}
			fails(csierr.TokenFileUnreadable)(t, s.Fault())
			_, _, err := New(Options{Host: "http://localhost"}, &Transport{Tokens: tokenFile(path)})
			if err == nil || !strings.HasPrefix(err.Error(), "OXIDE_TOKEN_FILE (--token-file): ") ||
				strings.Contains(err.Error(), path) {
				t.Errorf("got %v", err)
			}
			writeToken(t, path, "two")
			letGo()
			csitest.Await(t, "the new token is read", func() bool {
				token, err := s.get(t.Context(), false)
				return token == "two" && err == nil && s.Fault() == nil
			})
		})
	}
}

func TestTokenFileReadEndsAtTheCallersDeadline(t *testing.T) { // D-63
	path := filepath.Join(t.TempDir(), "token")
	hungMount(t, path)
	s := tokenFile(path)
	s.Limit = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if token, err := s.get(ctx, false); err == nil {
		t.Errorf("got %q", token)
	}
	if ctx.Err() == nil {
		t.Error("it did not wait")
	}
}

func TestTokenSourceReportsAnUnreadableFile(t *testing.T) { // D-63
	path := filepath.Join(t.TempDir(), "token")
	writeToken(t, path, "one")
	s := tokenFile(path)
	for name, breakFile := range map[string]func(){
		"it is gone":        func() { must(t, os.Remove(path)) },
		"it is empty":       func() { must(t, os.WriteFile(path, nil, 0o600)) },
		"it holds no token": func() { must(t, os.WriteFile(path, []byte("tweety tweety"), 0o600)) },
		"it is a directory": func() {
			must(t, os.Remove(path))
			must(t, os.Mkdir(path, 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, csitest.Err(s.get(t.Context(), false)))
			must(t, s.Fault())
			breakFile()
			if token, err := s.get(t.Context(), false); token != "one" || err != nil {
				t.Errorf("got %q, %v", token, err)
			}
			fails(csierr.TokenFileUnreadable)(t, s.Fault())
			must(t, os.RemoveAll(path))
			writeToken(t, path, "one")
			csitest.Await(t, "it is mended", func() bool { return s.Fault() == nil })
		})
	}
}
