package driver

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestAPanicInAGoroutineOfACallIsTheCalls(t *testing.T) {
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
			csitest.Want(t, err, codes.Internal, csierr.Internal)
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
	csitest.Await(t, "Probe says so", func() bool {
		_, err := h.state()
		return err != nil
	})
	end()
	_, err := h.state()
	csitest.Want(t, err, codes.Internal, csierr.Internal)
	if !strings.Contains(book.String(), "ProjectView") {
		t.Errorf("the log lacks the stack:\n%s", book)
	}
}

func TestEveryGoroutineIsStartedWhereItsPanicIsRecovered(t *testing.T) {
	var paths []string
	for _, pattern := range []string{"*.go", "*/*.go"} {
		found, err := filepath.Glob(pattern)
		must(t, err)
		paths = append(paths, found...)
	}
	looked := 0
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") || path == "async/async.go" {
			continue
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, 0)
		must(t, err)
		looked++
		ast.Inspect(file, func(n ast.Node) bool {
			starts := ""
			switch n := n.(type) {
			case *ast.GoStmt:
				starts = "a go statement"
			case *ast.SelectorExpr:
				from, _ := n.X.(*ast.Ident)
				if n.Sel.Name == "WaitGroup" ||
					n.Sel.Name == "AfterFunc" && (from == nil || from.Name != "async") {
					starts = n.Sel.Name
				}
			case *ast.ImportSpec:
				if strings.Contains(n.Path.Value, "errgroup") {
					starts = "errgroup"
				}
			}
			if starts != "" {
				t.Errorf("%s: %s; start goroutines by package async", files.Position(n.Pos()),
					starts)
			}
			return true
		})
	}
	if looked < 50 {
		t.Errorf("only %d files were looked at", looked)
	}
}
