package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Module is the path of the module that contains the two programs.
const Module = "github.com/oxidecomputer/oxide-csi-plugin"

// binaries builds each program once per run. The variables OXIDE_CSI_PLUGIN and
// OXIDE_SIMULATOR name programs that are built already, for machines without Go.
type binaries struct {
	// mu guards built, which has the path of each program that was built.
	mu    sync.Mutex
	built map[string]string
}

// Binary returns the path of a program of this module. The first call builds the program, with
// the race detector if this binary has it and the run is not plain.
func (r *Run) Binary(ctx context.Context, program string) (string, error) {
	if plain := os.Getenv(PlainVariable); r.Plain && plain != "" {
		return filepath.Abs(filepath.Join(plain, program))
	}
	if ready := os.Getenv(BinaryVariable(program)); ready != "" {
		return filepath.Abs(ready)
	}
	r.bins.mu.Lock()
	defer r.bins.mu.Unlock()
	if path := r.bins.built[program]; path != "" {
		return path, nil
	}
	path := filepath.Join(r.Dir, "bin", program)
	if err := r.build(ctx, program, path); err != nil {
		return "", err
	}
	if r.bins.built == nil {
		r.bins.built = map[string]string{}
	}
	r.bins.built[program] = path
	return path, nil
}

// PlainVariable is the environment variable that names the directory of the programs of plain
// runs.
const PlainVariable = "OXIDE_PLAIN_PROGRAMS"

// BinaryVariable returns the name of the environment variable that names a program that is
// built already.
func BinaryVariable(program string) string {
	return strings.ToUpper(strings.ReplaceAll(program, "-", "_"))
}

// command returns the command that starts a program, without its arguments.
func (r *Run) command(ctx context.Context, program string) ([]string, error) {
	if command := r.Programs[program]; command != nil {
		return command, nil
	}
	path, err := r.Binary(ctx, program)
	return []string{path}, err
}

func (r *Run) build(ctx context.Context, program, path string) error {
	args := []string{"build", "-o", path}
	how := ""
	if RaceDetector && !r.Plain {
		args = append(args, "-race")
		how = " with the race detector"
	}
	r.Say("building %s%s", program, how)
	start := time.Now()
	cmd := exec.CommandContext(ctx, "go", append(args, Module+"/cmd/"+program)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("build %s: %w\n%s", program, err, out)
	}
	r.Say("built %s in %.1fs", program, time.Since(start).Seconds())
	return nil
}
