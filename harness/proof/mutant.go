package proof

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Guard is a part of the driver that prevents damage. A mutant removes all of its places.
type Guard struct {
	// Name describes what the guard ensures.
	Name  string
	Edits []Edit
}

// Edit is one place of a guard. Place is a declaration of a package of driver or internal, as
// "package.Function" or "package.Type.Method". Text occurs once in the declaration, and With
// replaces it: that text does the same unless the guard is removed. In With, REMOVED is the
// condition that the guard is removed, and TEXT is the old text.
type Edit struct{ Place, Text, With string }

// The ways to remove a guard.
const (
	// NotAsked replaces a condition under which the driver refuses: it becomes false.
	NotAsked = "(!REMOVED && (TEXT))"
	// Taken replaces a condition without which the driver refuses: it becomes true.
	Taken = "(REMOVED || (TEXT))"
	// NotCalled replaces a call whose error makes the driver refuse: it is not made.
	NotCalled = "unless(REMOVED, func() error { return TEXT })"
)

// RemovedGuard is the environment variable that names the guard that a mutant removes.
const RemovedGuard = "OXIDE_REMOVED_GUARD"

// switches is source text that is added to each package of a mutant.
const switches = `package %s

import "os"

var removedGuard = os.Getenv("` + RemovedGuard + `")

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

// BuildMutant builds a driver in which every guard of the list has a switch, so one build suffices
// for all guards. It fails if the text of a guard is not in the source exactly once. Then the list
// has to be updated.
func BuildMutant(ctx context.Context, dir string, guards []Guard) (program string, err error) {
	driver, err := driverSource(ctx)
	if err != nil {
		return "", err
	}
	changed, err := mutate(driver, guards)
	if err != nil {
		return "", err
	}
	return build(ctx, filepath.Join(dir, "mutant"), changed)
}

// driverSource returns the directory of the driver's source.
func driverSource(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find this module: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "driver"), nil
}

// build builds the driver with changed or further source files, by path.
func build(ctx context.Context, program string, changed map[string]string) (string, error) {
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for path, text := range changed {
		aside := fmt.Sprintf("%s-%d.go", program, len(overlay.Replace))
		if err := os.WriteFile(aside, []byte(text), 0o600); err != nil {
			return "", err
		}
		overlay.Replace[path] = aside
	}
	b, err := json.Marshal(overlay)
	if err != nil {
		return "", err
	}
	list := program + "-overlay.json"
	if err := os.WriteFile(list, b, 0o600); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-overlay", list, "-o", program,
		harness.Module+"/cmd/oxide-csi-plugin")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the driver with changes to its source: %w\n%s", err, out)
	}
	return program, nil
}

// CheckGuards returns an error if the text of a guard is not in the source exactly once. It
// builds no mutant. The directory is the driver's.
func CheckGuards(driver string, guards []Guard) error {
	_, err := mutate(driver, guards)
	return err
}

// mutate returns the changed source files by path. Every guard has a switch in them.
func mutate(driver string, guards []Guard) (map[string]string, error) {
	source, err := readSource(driver)
	if err != nil {
		return nil, err
	}
	changed := map[string]string{}
	for _, g := range guards {
		for _, e := range g.Edits {
			d, ok := source[e.Place]
			if !ok {
				return nil, fmt.Errorf("guard %q: the driver declares no %s; correct the list of guards",
					g.Name, e.Place)
			}
			if n := strings.Count(d.text, e.Text); n != 1 {
				return nil, fmt.Errorf("guard %q: %s has the text %q %d times, it must have it once; "+
					"correct the list of guards", g.Name, e.Place, e.Text, n)
			}
			with := strings.ReplaceAll(e.With, "REMOVED", "removed("+strconv.Quote(g.Name)+")")
			with = strings.ReplaceAll(with, "TEXT", e.Text)
			mutant := strings.Replace(d.text, e.Text, with, 1)
			text, ok := changed[d.path]
			if !ok {
				text = d.file
			}
			changed[d.path] = strings.Replace(text, d.text, mutant, 1)
			d.text = mutant
			dir := filepath.Dir(d.path)
			changed[filepath.Join(dir, "proof_switches.go")] = fmt.Sprintf(switches, filepath.Base(dir))
		}
	}
	return changed, nil
}

// declaration is a function, a method or a variable of a source file.
type declaration struct{ path, file, text string }

// declarations matches those that gofmt has formatted: the first brace at the start of a line ends
// one, unless its first line does.
var declarations = regexp.MustCompile(`(?ms)^func (?:\(\w+ \*?(\w+)\) )?(\w+)[(\[]` +
	`(?:[^\n]*\}$|.*?^\})|^var (\w+) = [^\n]*\{$.*?^\}`)

// readSource finds the declarations of the driver's packages by name.
func readSource(driver string) (map[string]*declaration, error) {
	paths, err := filepath.Glob(filepath.Join(driver, "*", "*.go"))
	internal, err2 := filepath.Glob(filepath.Join(driver, "..", "internal", "*", "*.go"))
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	found := map[string]*declaration{}
	for _, path := range append(paths, internal...) {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		for _, m := range declarations.FindAllStringSubmatch(string(b), -1) {
			name := strings.TrimPrefix(m[1]+"."+m[2]+m[3], ".")
			found[filepath.Base(filepath.Dir(path))+"."+name] = &declaration{path, string(b), m[0]}
		}
	}
	return found, nil
}
