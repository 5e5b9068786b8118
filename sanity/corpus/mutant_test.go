package corpus_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// guard is a piece of the driver without which it would do harm. It may stand in several places,
// one behind the other; it is taken away in all of them.
type guard struct {
	// name says what holds as long as the guard is there.
	name  string
	edits []edit
	// trials are the names of generators that must notice when it is gone: each of them tries what
	// this guard alone prevents.
	trials []string
}

// edit is one place: text stands once in the file, and makes way for a text that does the same
// unless the guard is taken away. There REMOVED is the condition that it is, and TEXT the old text.
type edit struct{ file, text, with string }

// The ways to take a guard away.
const (
	// notAsked is for a condition under which the driver refuses.
	notAsked = "(!REMOVED && (TEXT))"
	// taken is for a condition without which it refuses.
	taken = "(REMOVED || (TEXT))"
	// notCalled is for a call whose error refuses.
	notCalled = "unless(REMOVED, func() error { return TEXT })"
)

// removedVariable tells a mutant which guard it lacks.
const removedVariable = "OXIDE_REMOVED_GUARD"

// switches is what the mutant's source has besides.
const switches = `package driver

import "os"

var removedGuard = os.Getenv("` + removedVariable + `")

func removed(guard string) bool { return removedGuard == guard }

func unless(skip bool, ask func() error) error {
	if skip {
		return nil
	}
	return ask()
}

func zeroIf[T any](zero bool, value T) T {
	if zero {
		return *new(T)
	}
	return value
}

var _, _, _ = removed, unless, zeroIf[int]
`

// buildMutant builds a driver in which every guard of the list has a switch of its own: one build,
// and as many drivers as there are guards. A guard whose text is not in the source exactly once is
// an error, so that the list follows the code.
func buildMutant(ctx context.Context, dir string, guards []guard) (program string, err error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find this module: %w", err)
	}
	source := filepath.Join(strings.TrimSpace(string(out)), "driver")
	changed, err := mutate(source, guards)
	if err != nil {
		return "", err
	}
	changed["corpus_switches.go"] = switches
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for name, text := range changed {
		aside := filepath.Join(dir, name)
		if err := os.WriteFile(aside, []byte(text), 0o600); err != nil {
			return "", err
		}
		overlay.Replace[filepath.Join(source, name)] = aside
	}
	b, err := json.Marshal(overlay)
	if err != nil {
		return "", err
	}
	list := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(list, b, 0o600); err != nil {
		return "", err
	}
	program = filepath.Join(dir, "mutant")
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", list, "-o", program,
		"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi-plugin")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the driver with switches for its guards: %w\n%s", err, out)
	}
	return program, nil
}

// mutate gives every guard its switch, in the files' texts.
func mutate(source string, guards []guard) (map[string]string, error) {
	changed := map[string]string{}
	for _, g := range guards {
		for _, e := range g.edits {
			text, ok := changed[e.file]
			if !ok {
				b, err := os.ReadFile(filepath.Join(source, e.file))
				if err != nil {
					return nil, fmt.Errorf("guard %q: %w", g.name, err)
				}
				text = string(b)
			}
			if n := strings.Count(text, e.text); n != 1 {
				return nil, fmt.Errorf("guard %q: %s has the text %q %d times, it must have it once; "+
					"correct the list of guards", g.name, e.file, e.text, n)
			}
			with := strings.ReplaceAll(e.with, "REMOVED", "removed("+strconv.Quote(g.name)+")")
			with = strings.ReplaceAll(with, "TEXT", e.text)
			changed[e.file] = strings.Replace(text, e.text, with, 1)
		}
	}
	return changed, nil
}
