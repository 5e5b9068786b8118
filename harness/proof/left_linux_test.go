package proof_test

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// killedProof is the environment variable that marks the process that
// TestTheDevicesOfAKilledProofsRackAreReleased kills.
const killedProof = "PROOF_TEST_IS_KILLED"

func TestTheDevicesOfAKilledProofsRackAreReleased(t *testing.T) {
	if os.Getenv(killedProof) != "" {
		leaveRack(t)
	}
	dir, err := os.MkdirTemp("", "left-") // a short path, for the sockets below it
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	process := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	process.Env = append(os.Environ(), killedProof+"=1", "OXIDE_SANITY_DIR="+dir)
	process.Stderr = os.Stderr
	in, inErr := process.StdinPipe()
	out, outErr := process.StdoutPipe()
	must(t, errors.Join(inErr, outErr))
	defer in.Close()
	must(t, process.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	serial := strings.TrimSpace(line)
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait() // It was killed.
	})
	must(t, err)
	harness.RunFor(t)
	if found, err := loopdev.Find(serial); err != nil || len(found) != 1 || found[0].Releasing {
		t.Fatalf("while its proof lives, the rack that was killed has %+v, %v; want its one device %q",
			found, err, line)
	}
	must(t, process.Process.Kill())
	_ = process.Wait() // It was killed.
	run := harness.RunFor(t)
	if found, err := loopdev.Find(serial); err != nil || len(found) > 0 {
		t.Errorf("the run in %s found and left %+v, %v", run.Dir, found, err)
	}
}

// leaveRack attaches a disk, kills the rack, prints the name of the disk's device, and waits
// until this process is killed.
func leaveRack(t *testing.T) {
	run, err := harness.NewRun(os.Stderr)
	must(t, err)
	rack, err := run.StartRack(t.Context(), harness.RackOptions{})
	must(t, err)
	disk, err := rack.CreateDisk(t.Context(), rack.Project, "left-behind-"+strings.ToLower(
		rack.Token[len(rack.Token)-6:]), harness.GiB)
	must(t, err)
	must(t, rack.AttachDisk(t.Context(), disk.Id, rack.Instance("a").ID))
	rack.Kill()
	_, err = os.Stdout.WriteString(string(disk.Name) + "\n")
	must(t, err)
	_, err = io.ReadAll(os.Stdin)
	t.Fatalf("the process was to be killed, and its input has ended: %v", err)
}
