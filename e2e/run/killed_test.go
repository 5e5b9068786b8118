//go:build linux

package main

import (
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// killedRun is an environment variable. TestARunThatIsKilledTakesTheSuiteWithIt sets it for the
// process that it kills.
const killedRun = "E2E_RUN_TEST_IS_KILLED"

func TestARunThatIsKilledTakesTheSuiteWithIt(t *testing.T) {
	if os.Getenv(killedRun) != "" {
		s := suiteRun{engine: &engine.Engine{}, root: "../..", stdout: os.Stdout}
		t.Fatal(s.suite(t.Context(), nil, "sh", "-c", "echo begun; exec sleep 60"))
	}
	output, itsOutput, err := os.Pipe()
	csitest.Must(t, err)
	defer output.Close()
	run := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	run.Env = append(os.Environ(), killedRun+"=1")
	run.Stdout, run.Stderr = itsOutput, itsOutput
	csitest.Must(t, run.Start())
	itsOutput.Close()
	csitest.Must(t, output.SetReadDeadline(time.Now().Add(20*time.Second)))
	begun := make([]byte, len("begun\n"))
	_, err = io.ReadFull(output, begun)
	killErr := run.Process.Kill()
	_ = run.Wait() // It was killed.
	if err != nil || string(begun) != "begun\n" || killErr != nil {
		t.Fatalf("the suite wrote %q, %v; kill: %v", begun, err, killErr)
	}
	// The suite keeps the pipe open as long as it runs.
	if rest, err := io.ReadAll(output); err != nil {
		t.Errorf("the suite lives on, and writes %q: %v", rest, err)
	}
}
