package proof

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const module = "github.com/oxidecomputer/oxide-csi-plugin"

// StepTimes is the environment variable that names the file to which a timed driver writes the
// times of its steps.
const StepTimes = "OXIDE_STEP_TIMES"

// Step is a step of a call, with the functions of the driver that do it. Functions are written
// as in Edit.Place.
type Step struct {
	Name      string
	Functions []string
}

// clock is the source of a package that is added to a timed driver. The time of a step within
// another step is not counted for the outer one. When the outermost step ends, a line is
// written.
const clock = `package steptimes

import (
	"encoding/json"
	"os"
	"sync"
	"time"
)

var (
	mu    sync.Mutex
	open  []string // the steps that run, from the outermost to the innermost
	since time.Time
	took  = map[string]time.Duration{}
)

func charge() {
	now := time.Now()
	if len(open) > 0 {
		took[open[len(open)-1]] += now.Sub(since)
	}
	since = now
}

func Begin(step string) (end func()) {
	mu.Lock()
	defer mu.Unlock()
	charge()
	open = append(open, step)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		charge()
		if open = open[:len(open)-1]; len(open) > 0 {
			return
		}
		line, _ := json.Marshal(took)
		clear(took)
		f, err := os.OpenFile(os.Getenv("` + StepTimes + `"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err == nil {
			_, _ = f.Write(append(line, '\n'))
			_ = f.Close()
		}
	}
}
`

// BuildTimed builds a driver that writes how long the steps of each call took. The functions
// of the steps must not run on several goroutines at once, so only one call may be made at a
// time. BuildTimed fails if the driver does not have a function, so the list has to follow the
// code.
func BuildTimed(ctx context.Context, dir string, steps []Step) (program string, err error) {
	driver, err := driverSource(ctx)
	if err != nil {
		return "", err
	}
	changed, err := timeSteps(driver, steps)
	if err != nil {
		return "", err
	}
	return build(ctx, filepath.Join(dir, "timed"), changed)
}

// CheckSteps returns an error if the driver does not have a function of the steps. It builds
// nothing. The directory is the driver's.
func CheckSteps(driver string, steps []Step) error {
	_, err := timeSteps(driver, steps)
	return err
}

// timeSteps returns the changed source files by path. They measure the time of every function
// of the steps.
func timeSteps(driver string, steps []Step) (map[string]string, error) {
	source, err := readSource(driver)
	if err != nil {
		return nil, err
	}
	changed := map[string]string{filepath.Join(driver, "steptimes", "clock.go"): clock}
	for _, step := range steps {
		for _, function := range step.Functions {
			d, ok := source[function]
			head, body, isFunction := "", "", false
			if ok {
				head, body, isFunction = strings.Cut(d.text, "{\n")
			}
			if !isFunction {
				return nil, fmt.Errorf("step %s: the driver declares no function %s; correct the list "+
					"of steps", step.Name, function)
			}
			text, again := changed[d.path]
			if !again {
				// The import is written on the line of the package clause, which is below the
				// file's comments.
				clause := "\npackage " + strings.Split(function, ".")[0] + "\n"
				text = strings.Replace("\n"+d.file, clause, strings.TrimSuffix(clause, "\n")+
					`; import "`+module+`/driver/steptimes"`+"\n", 1)
			}
			changed[d.path] = strings.Replace(text, d.text,
				head+"{\ndefer steptimes.Begin("+strconv.Quote(step.Name)+")()\n"+body, 1)
		}
	}
	return changed, nil
}

// ReadStepTimes reads the times that a timed driver has written to a file, as one map for each
// call, and empties the file.
func ReadStepTimes(path string) ([]map[string]time.Duration, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var calls []map[string]time.Duration
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var took map[string]time.Duration
		if err := json.Unmarshal(lines.Bytes(), &took); err != nil {
			return nil, err
		}
		calls = append(calls, took)
	}
	return calls, os.Truncate(path, 0)
}
