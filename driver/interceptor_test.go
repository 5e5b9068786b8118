package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// Programs search the log for the ids of a volume, a node or a snapshot.
func TestACallIsLoggedInOneLineWithItsObjectsAndDuration(t *testing.T) { // B-15
	const volume, node, snapshot = racktest.Disk, racktest.Instance, racktest.Snapshot
	type objects map[string]string
	for _, test := range []struct {
		method      string
		req, answer any
		want        objects
	}{
		{"/csi.v1.Controller/CreateVolume", &csi.CreateVolumeRequest{Name: "pvc-1",
			Secrets: map[string]string{"key": canary}},
			&csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: volume}},
			objects{"name": "pvc-1", "volume": volume}},
		{"/csi.v1.Controller/CreateVolume", &csi.CreateVolumeRequest{Name: strings.Repeat("n", 1<<20)},
			nil, objects{"name": strings.Repeat("n", 1000) + "…"}},
		{"/csi.v1.Controller/ControllerPublishVolume",
			&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node},
			&csi.ControllerPublishVolumeResponse{}, objects{"volume": volume, "node": node}},
		{"/csi.v1.Node/NodeStageVolume", &csi.NodeStageVolumeRequest{VolumeId: volume},
			&csi.NodeStageVolumeResponse{}, objects{"volume": volume}},
		{"/csi.v1.Controller/CreateSnapshot",
			&csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: volume},
			&csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: snapshot}},
			objects{"name": "snap-1", "source": volume, "snapshot": snapshot}},
	} {
		t.Run(shortMethod(test.method), func(t *testing.T) {
			logged := func(c Config) *logBook {
				book := &logBook{}
				_, err := logCalls(newLog(c, &hidden{}, book))(t.Context(), test.req,
					&grpc.UnaryServerInfo{FullMethod: test.method},
					func(context.Context, any) (any, error) { return test.answer, nil })
				must(t, err)
				return book
			}
			debug := logged(Config{LogLevel: slog.LevelDebug}).String()
			if !strings.Contains(debug, "request=") || strings.Contains(debug, canary) {
				t.Errorf("at debug level the log lacks the request, or has a secret:\n%.1000s", debug)
			}
			book := logged(Config{LogJSON: true})
			var line map[string]any
			if err := json.Unmarshal([]byte(book.String()), &line); err != nil {
				t.Fatalf("not one line of JSON: %v\n%s", err, book)
			}
			if line["level"] != "INFO" || line["msg"] != "done" ||
				line["method"] != shortMethod(test.method) {
				t.Errorf("got %v", line)
			}
			if took, ok := line["took"].(float64); !ok || took <= 0 {
				t.Errorf("took %v, want nanoseconds", line["took"])
			}
			for key, value := range test.want {
				if line[key] != value {
					t.Errorf("%s is %v, want %s", key, line[key], value)
				}
			}
			known := []string{"time", "level", "msg", "method", "call", "took"}
			known = slices.AppendSeq(known, maps.Keys(test.want))
			for key := range line {
				if !slices.Contains(known, key) {
					t.Errorf("%s is in the log too", key)
				}
			}
		})
	}
}

func TestACanceledCallDoesNotBegin(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	req := &csi.NodePublishVolumeRequest{VolumeId: "a"}
	var l locks
	for _, c := range []struct {
		ctx    context.Context
		reason csierr.Reason
	}{{gone, csierr.Canceled}, {late, csierr.DeadlineExceeded}} {
		_, err := l.intercept(c.ctx, req, nil, func(context.Context, any) (any, error) {
			t.Error("the call began")
			return nil, nil
		})
		fails(c.reason)(t, err)
	}
	began := false
	if _, err := l.intercept(t.Context(), req, nil, func(context.Context, any) (any, error) {
		began = true
		return nil, nil
	}); err != nil || !began {
		t.Errorf("the lock is held by calls that never began: %v", err)
	}
}

func TestAPanicInARackCheckIsReportedByProbe(t *testing.T) {
	book := &logBook{}
	// This rack.Client contains no client of the API, so every check panics.
	h := &rackHealth{Rack: &rack.Client{Project: racktest.Project},
		Log: newLog(Config{}, &hidden{}, book), asked: make(chan struct{}, 1)}
	end := begin(t, h)
	awaitHealth(t, h, false)
	end()
	fails(csierr.Internal)(t, csitest.Err(h.state()))
	if !strings.Contains(book.String(), "ProjectView") {
		t.Errorf("the log lacks the stack:\n%s", book)
	}
}

func TestOnlyPackageAsyncStartsGoroutines(t *testing.T) {
	starts := regexp.MustCompile(`(?m)^.*(\tgo .*\(|\bWaitGroup\b|errgroup|\.AfterFunc\().*$`)
	paths := csitest.Got(filepath.Glob("*.go"))(t)
	below := csitest.Got(filepath.Glob("*/*.go"))(t)
	looked := 0
	for _, path := range append(paths, below...) {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source := csitest.Got(os.ReadFile(path))(t)
		looked++
		for _, line := range starts.FindAllString(string(source), -1) {
			if !strings.Contains(line, "async.AfterFunc(") {
				t.Errorf("%s: %s; start goroutines by package async", path, line)
			}
		}
	}
	if looked < 35 {
		t.Errorf("only %d files were looked at", looked)
	}
}

func TestATokenOfAnyFormIsRedacted(t *testing.T) { // B-15
	for _, token := range []string{"x", "hunter2", "tweetytweety", "tweetytweety-without-a-prefix",
		`tweety"tweety\tweety`, "tweety<tweety>&tweety", "tweety***tweety", "a.b+c(d)e[f]$tweety",
		strings.Repeat("tweety", 600), "oxide-token-a/b+tweetytweety==", `oxide-token-a"tweetytweety`,
		"oxide-token-a<tweetytweety>&x", `oxide-token-\tweetytweety`, "oxide-token-,{tweetytweety}"} {
		h := &hidden{}
		h.add(token)
		asJSON := csitest.Got(json.Marshal(token))(t)
		for _, shown := range []string{token, "Bearer " + token, token + token,
			fmt.Sprintf("%q", token), string(asJSON), fmt.Sprintf("%.80q", token),
			fmt.Sprintf("%q", string(asJSON)), fmt.Sprintf("%q", fmt.Sprintf("%q", token)),
			csierr.Plain("no such project " + token)} {
			clean := h.text("1: " + shown + " :2")
			if strings.Contains(clean, token) || strings.Contains(clean, "tweetytweety") ||
				!strings.HasPrefix(clean, "1: ") || !strings.HasSuffix(clean, " :2") {
				t.Errorf("%.80q is shown as %.80q", shown, clean)
			}
		}
	}
}

func TestReplacedTokensAreStillRedacted(t *testing.T) { // B-15
	h := &hidden{}
	for n := range maxTokens {
		h.add(fmt.Sprintf("tweety-%d", n))
	}
	for n := range maxTokens {
		if got := h.text(fmt.Sprintf("the token tweety-%d.", n)); strings.Contains(got, "tweety") {
			t.Errorf("token number %d, with a limit of %d, is shown: %s", n, maxTokens, got)
		}
	}
	h.add("tweety-0")
	if got := len(h.tokens); got != maxTokens {
		t.Errorf("%d tokens are kept", got)
	}
	h.add("another")
	if got := len(h.tokens); got != maxTokens || h.text("another") != "***" {
		t.Errorf("%d tokens are kept: %q", got, h.tokens)
	}
}

func TestEveryTokenInATextIsRedacted(t *testing.T) { // B-15
	rapid.Check(t, func(t *rapid.T) {
		h := &hidden{}
		word := rapid.StringOfN(rapid.RuneFrom([]rune("ab\"\\<é")), 1, 30, -1)
		tokens := rapid.SliceOfN(word, 1, 3).Draw(t, "tokens")
		for _, token := range tokens {
			h.add(token)
		}
		text := rapid.SliceOf(rapid.OneOf(word, rapid.SampledFrom(tokens))).Draw(t, "text")
		clean := h.text(strings.Join(text, " "))
		for _, token := range tokens {
			if strings.Contains(clean, token) {
				t.Fatalf("%q of %q is left in %q", token, tokens, clean)
			}
		}
	})
}

// A response may contain several whole or truncated tokens, and the driver may truncate it.
func TestTruncatedTokensAreRedacted(t *testing.T) { // B-15
	rapid.Check(t, func(t *rapid.T) {
		h := &hidden{}
		token := rapid.StringOfN(rapid.RuneFrom([]rune(`ab"\<-0`)), minPrefix, 30, -1).Draw(t, "token")
		h.add(token)
		var text strings.Builder
		for range rapid.IntRange(1, 5).Draw(t, "pieces") {
			text.WriteString(token[:rapid.IntRange(minPrefix, len(token)).Draw(t, "length")])
			text.WriteString(rapid.SampledFrom([]string{"", " ", "-", `"`}).Draw(t, "between"))
		}
		cut := text.String()[:rapid.IntRange(0, text.Len()).Draw(t, "cut")]
		clean := h.text(cut)
		for n := range len(token) - minPrefix + 1 {
			if part := token[n:][:minPrefix]; strings.Contains(clean, part) {
				t.Fatalf("%q of %q, which %q has, is left in %q", part, token, cut, clean)
			}
		}
	})
}

type showsToken struct{ token string }

func (s showsToken) LogValue() slog.Value { return slog.StringValue("a value with " + s.token) }

func TestLogLinesShowNoToken(t *testing.T) { // B-15
	const token = "tweetytweety-without-a-prefix"
	for _, asJSON := range []bool{false, true} {
		book := &logBook{}
		h := &hidden{}
		h.add(token)
		log := newLog(Config{LogJSON: asJSON}, h, book)
		log.With("with", token).Info("message "+token, "error", errors.New("error "+token),
			"text", token, "value", showsToken{token}, "list", []string{token},
			slog.Group("group", "inner", token), "visible", 1984)
		if text := book.String(); strings.Contains(text, "tweety") || !strings.Contains(text, "1984") {
			t.Errorf("the log has %s", text)
		}
	}
}
