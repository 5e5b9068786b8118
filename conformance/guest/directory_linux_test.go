package guest

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestADirectoryStaysUntilTheProgramsOfItsKilledAgentHaveEnded(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	d, err := newDirectory()
	csitest.Must(t, err)
	program := exec.Command("cat")
	stdin, err := program.StdinPipe()
	csitest.Must(t, errors.Join(err, program.Start()))

	// The end of the agent closes the file, and its namespace shows the tmpfs to nobody else.
	csitest.Must(t, errors.Join(d.lock.Close(), unix.Unmount(d.path, unix.MNT_DETACH)))
	Sweep()
	if _, err := os.Stat(d.path); err != nil {
		t.Errorf("while a program of the agent lives: %v", err)
	}
	csitest.Must(t, errors.Join(stdin.Close(), program.Wait()))
	Sweep()
	if _, err := os.Stat(d.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the program has ended the directory should be gone: %v", err)
	}
}
