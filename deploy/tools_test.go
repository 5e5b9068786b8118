package deploy_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// toolsModule is the flag that takes the programs of these tests from a module of their own, so
// that the driver's module does not depend on them.
const toolsModule = "-modfile=../tools/go.mod"

// tools contains the paths of the programs that were built.
var tools sync.Map

// tool returns the path of a program of the tools' module. It builds the program unless that was
// done by make or an earlier call.
func tool(t *testing.T, name string) string {
	t.Helper()
	if made := madeBeside(name); made != "" {
		return made
	}
	if found, ok := tools.Load(name); ok {
		return found.(string)
	}
	// As make builds what has no race detector.
	out, complaints, err := run(t, nil, "env", "CGO_ENABLED=0", "GOFLAGS=-trimpath",
		"go", "tool", toolsModule, "-n", name)
	if err != nil {
		t.Fatalf("build the tool %s: %v\n%s", name, err, complaints)
	}
	found := strings.TrimSpace(out)
	tools.Store(name, found)
	return found
}

// program returns the path of one of our programs: the one that make built beside the driver, or
// one that is built here.
func program(t *testing.T, name string) string {
	t.Helper()
	if made := madeBeside(name); made != "" {
		return made
	}
	built := filepath.Join(t.TempDir(), name)
	if out, complaints, err := run(t, nil, "go", "build", "-o", built, "../cmd/"+name); err != nil {
		t.Fatalf("build %s: %v\n%s%s", name, err, out, complaints)
	}
	return built
}

// madeBeside returns the path of a program that make built beside the driver, or "".
func madeBeside(name string) string {
	path := filepath.Join(filepath.Dir(os.Getenv("OXIDE_CSI_PLUGIN")), name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// run runs a program and returns its output. The error is its exit status.
func run(t *testing.T, input []byte, name string, args ...string) (stdout, stderr string,
	err error) {
	t.Helper()
	return finish(t, exec.CommandContext(t.Context(), name, args...), input)
}

func finish(t *testing.T, cmd *exec.Cmd, input []byte) (stdout, stderr string, err error) {
	t.Helper()
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &complaints
	cmd.Env = append(cmd.Environ(), "GOGC=400") // most programs end before they need a collection
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", cmd.Path, err)
	}
	return out.String(), complaints.String(), err
}
