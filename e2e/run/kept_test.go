//go:build linux

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// kept creates what a run with KEEP=1 leaves, except the cluster: a work directory with one disk,
// which a loop device uses, and the note that names the directory.
func kept(t *testing.T) (s *suiteRun, work string, disk loopdev.Device) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("only root can attach loop devices: run the tests as root, as make test does")
	}
	s = &suiteRun{options: options{cache: t.TempDir()}, stdout: t.Output()}
	work = filepath.Join(t.TempDir(), "work")
	disks := filepath.Join(work, "rack", "disks")
	file := filepath.Join(disks, "disk")
	for _, err := range []error{
		os.MkdirAll(disks, 0o755), os.WriteFile(file, nil, 0o600), os.Truncate(file, 1<<20),
		os.WriteFile(s.note(), []byte(work), 0o600),
	} {
		csitest.Must(t, err)
	}
	disk, err := loopdev.Attach(t.Context(), loopdev.Config{Path: file, Serial: "e2e-run-test",
		First: 1000})
	csitest.Must(t, err)
	t.Cleanup(func() {
		if err := disk.Detach(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return s, work, disk
}

func attached(t *testing.T, disk loopdev.Device) bool {
	t.Helper()
	all, err := loopdev.List()
	csitest.Must(t, err)
	return slices.ContainsFunc(all, func(d loopdev.Device) bool {
		return d.Sequence == disk.Sequence
	})
}

func TestAFailedRunKeepsDiskFilesAndDetachesTheirDevices(t *testing.T) {
	s, work, disk := kept(t)
	csitest.Must(t, s.tidy(t.Context(), work, "", false))
	if attached(t, disk) {
		t.Errorf("%s is still attached", disk.Path)
	}
	if _, err := os.Stat(filepath.Join(work, "rack", "disks", "disk")); err != nil {
		t.Errorf("the disk's file should be left to look at: %v", err)
	}
	if _, err := os.Lstat(s.note()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the note should be gone, or the next run removes the files: %v", err)
	}
}

func TestFilesOfABusyDeviceStayWhenTheKeptClusterIsRemoved(t *testing.T) {
	s, work, disk := kept(t)
	holder, err := os.Open(disk.Path)
	csitest.Must(t, err)
	defer holder.Close()
	err = s.removeKept(t.Context())
	if !errors.Is(err, loopdev.ErrBusy) || !strings.Contains(err.Error(), "make e2e-down") {
		t.Errorf("removeKept = %v, want that the device is busy, and what to do", err)
	}
	for _, path := range []string{filepath.Join(work, "rack", "disks", "disk"), s.note()} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("without this the next run does not find the device: %v", err)
		}
	}
	holder.Close()
	if err := s.removeKept(t.Context()); err != nil || attached(t, disk) {
		t.Errorf("removeKept without a holder = %v, attached: %t", err, attached(t, disk))
	}
	for _, path := range []string{work, s.note()} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s should be gone: %v", path, err)
		}
	}
}

// killedRun is set in the environment of the process that the test below kills.
const killedRun = "E2E_RUN_TEST_IS_KILLED"

func TestTheSuiteEndsIfTheProgramThatStartedItIsKilled(t *testing.T) {
	if os.Getenv(killedRun) != "" {
		s := suiteRun{engine: &engine.Engine{}, root: "../..", stdout: os.Stdout}
		t.Fatal(s.suite(t.Context(), "", "sh", "-c", "echo begun; exec sleep 60"))
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
	_ = run.Wait() // its error only says that it was killed
	if err != nil || string(begun) != "begun\n" || killErr != nil {
		t.Fatalf("the suite wrote %q, %v; kill: %v", begun, err, killErr)
	}
	// The suite has the pipe open while it runs, so ReadAll returns only after the suite has ended.
	if rest, err := io.ReadAll(output); err != nil {
		t.Errorf("the suite lives on, and writes %q: %v", rest, err)
	}
}
