package guest

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

func TestADirectoryOutlivesTheProgramsOfItsAgent(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	d, err := newDirectory()
	if err != nil {
		t.Fatal(err)
	}
	program := exec.Command("cat")
	program.ExtraFiles = []*os.File{d.lock}
	stdin, err := program.StdinPipe()
	if err := errors.Join(err, program.Start()); err != nil {
		t.Fatal(err)
	}
	// The end of the agent closes the file, and its namespace shows the tmpfs to nobody else.
	if err := errors.Join(d.lock.Close(), unix.Unmount(d.path, unix.MNT_DETACH)); err != nil {
		t.Fatal(err)
	}
	Sweep()
	if _, err := os.Stat(d.path); err != nil {
		t.Errorf("while a program of the agent lives: %v", err)
	}
	if err := errors.Join(stdin.Close(), program.Wait()); err != nil {
		t.Fatal(err)
	}
	Sweep()
	if _, err := os.Stat(d.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the program has ended the directory should be gone: %v", err)
	}
}
