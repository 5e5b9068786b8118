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

// Module is the path under which the go command knows the two programs' sources.
const Module = "github.com/oxidecomputer/oxide-csi-plugin"

// binaries builds each program once per run. OXIDE_CSI_PLUGIN and OXIDE_SIMULATOR name ready ones,
// for machines without Go.
type binaries struct {
	// mu guards built, the paths by program.
	mu    sync.Mutex
	built map[string]string
}

// Binary gives the path of a program of this module, which it builds at the first call; with the
// race detector when this binary has it.
func (r *Run) Binary(ctx context.Context, program string) (string, error) {
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

// BinaryVariable is the variable that names a ready binary.
func BinaryVariable(program string) string {
	return strings.ToUpper(strings.ReplaceAll(program, "-", "_"))
}

// command is how a program is started, without its arguments.
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
	if RaceDetector {
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
