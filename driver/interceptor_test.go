package driver

import (
	"context"
	"encoding/json"
	"errors"
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

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// Programs read the log too: they find the calls of a volume by its ids.
func TestACallIsLoggedInOneLineWithItsObjectsAndDuration(t *testing.T) {
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
			book := &logBook{}
			_, err := logCalls(newLog(Config{LogJSON: true}, &hidden{}, book))(t.Context(), test.req,
				&grpc.UnaryServerInfo{FullMethod: test.method},
				func(context.Context, any) (any, error) { return test.answer, nil })
			must(t, err)
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

func TestAPanicInAGoroutineIsThePanicOfItsCall(t *testing.T) {
	for name, call := range map[string]func() (any, error){
		"in the background": func() (any, error) { return async.Start(panicking)() },
		"in a crew": func() (any, error) {
			var group async.Group
			for range 3 {
				group.Go(func() { _, _ = panicking() })
			}
			group.Wait()
			return nil, errors.New("it went on")
		},
	} {
		t.Run(name, func(t *testing.T) {
			book := &logBook{}
			_, err := recoverPanics(newLog(Config{}, &hidden{}, book))(t.Context(), nil,
				&grpc.UnaryServerInfo{FullMethod: "/csi.v1.Node/NodeStageVolume"},
				func(context.Context, any) (any, error) { return call() })
			fails(csierr.Internal)(t, err)
			if log := book.String(); !strings.Contains(log, "driver.panicking") ||
				!strings.Contains(log, "NodeStageVolume") || strings.Contains(log, canary) {
				t.Errorf("the log has to hold the goroutine's stack and not the panic's text:\n%s", log)
			}
		})
	}
}

func panicking() (any, error) { panic("the secret is " + canary) }

func TestAPanicInARackCheckIsReportedByProbe(t *testing.T) {
	book := &logBook{}
	// Without a client every check panics.
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

func TestGoroutinesAreStartedByPackageAsync(t *testing.T) {
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
	if looked < 40 {
		t.Errorf("only %d files were looked at", looked)
	}
}
