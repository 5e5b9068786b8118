package driver

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// nodeTools are the programs the node runs. Mounting needs none: that is done by system calls,
// which keeps mount flags out of the process list.
var nodeTools = []string{"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs"}

// missingTools names the programs the node needs and cannot find. Probe answers with them.
func missingTools() []string {
	var missing []string
	for _, tool := range nodeTools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}

// toolResult is what a program left behind.
type toolResult struct {
	Exit   int
	Stdout string
	Stderr string
}

// runTool runs a program to its end and reports its exit status, whatever it is; an error means
// that it could not be run. There is no context on purpose: a mkfs or a repair that is cut off
// leaves worse than one that takes long. inherit becomes descriptors 3 and up.
func runTool(inherit []*os.File, name string, args ...string) (toolResult, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &stdout, &stderr, inherit
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	err := cmd.Run()
	result := toolResult{Stdout: stdout.String(), Stderr: stderr.String()}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited():
		result.Exit = exit.ExitCode()
	case err != nil:
		return result, refuse(ReasonNodeToolFailed, "run %s: %w", name, err)
	}
	return result, nil
}

// failure is the error for a program that ended badly, with the end of what it said.
func (r toolResult) failure(name, path string) error {
	return refuse(ReasonNodeToolFailed, "%s on %s ended with status %d: %s", name, path, r.Exit,
		lastWords(r.Stdout+"\n"+r.Stderr))
}

// lastWords makes one line of the end of a program's output.
func lastWords(output string) string {
	const most = 300
	words := strings.Join(strings.Fields(output), " ")
	if words == "" {
		return "it said nothing"
	}
	if len(words) > most {
		words = "…" + strings.ToValidUTF8(words[len(words)-most:], "")
	}
	return fmt.Sprintf("%q", words)
}
