// Testrun runs the commands of a make target, shows how far they are, and ends with a summary and a
// figure. A command that is "go test" runs with -json; the output of others is shown as it is.
//
//	testrun -target test -- go test -short ./... -- go test -C tools ./...
//	testrun -table test        the packages and tests of the last run, the slowest first
//
// The events of a run are kept in .cache/testrun. The CPU time of a package includes the programs
// that its tests start and wait for; that of a single test cannot be measured, because tests of a
// package share a process.
package main

import (
	"bufio"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	target := flag.String("target", "", "the name of the make target")
	since := flag.Int64("since", time.Now().Unix(), "when make began, in seconds since 1970")
	cold := flag.Bool("cold", false, "Go's build cache was empty then")
	table := flag.String("table", "", "print the table of this target's last run")
	cpu := flag.String("cpu", "", "run a test binary, and append its directory and CPU time to a file")
	flag.Parse()
	var err error
	switch {
	case *cpu != "":
		err = measured(*cpu, flag.Args())
	case *table != "":
		err = printTable(os.Stdout, *table)
	default:
		err = run(*target, time.Unix(*since, 0), *cold, commands(flag.Args()))
	}
	var exited *exec.ExitError
	if errors.As(err, &exited) {
		os.Exit(max(1, exited.ExitCode()))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// commands splits arguments at "--".
func commands(args []string) [][]string {
	all := [][]string{nil}
	for _, arg := range args {
		if last := len(all) - 1; arg != "--" {
			all[last] = append(all[last], arg)
		} else if len(all[last]) > 0 {
			all = append(all, nil)
		}
	}
	return all
}

func kept(target, kind string) string { return filepath.Join(".cache", "testrun", target+"."+kind) }

// run runs commands one after the other, also after one has failed.
func run(target string, since time.Time, cold bool, commands [][]string) error {
	// An interrupt ends the commands, and then this program.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt, syscall.SIGTERM)
	if err := os.MkdirAll(filepath.Dir(kept(target, "json")), 0o755); err != nil {
		return err
	}
	cpu, err := filepath.Abs(kept(target, "cpu"))
	if err == nil {
		err = os.WriteFile(cpu, nil, 0o644)
	}
	if err != nil {
		return err
	}
	events, err := os.Create(kept(target, "json"))
	if err != nil {
		return err
	}
	defer events.Close()
	r := &results{out: os.Stderr, since: since}
	tests := make([]bool, len(commands))
	for i, command := range commands {
		if tests[i] = len(command) > 1 && command[0] == "go" && command[1] == "test"; tests[i] {
			n, err := packages(command)
			if err != nil {
				return err
			}
			r.of += n
		}
	}
	var errs []error
	var used time.Duration
	for i, command := range commands {
		took, err := r.one(command, tests[i], cpu, events)
		used += took
		errs = append(errs, err)
	}
	r.summarize(target)
	key := "warm_s"
	if cold {
		key = "cold_s"
	}
	fmt.Printf("FIGURE loop target=%s %s=%.0f tests=%d cpu_s=%.0f\n", target, key,
		time.Since(since).Seconds(), r.tests, used.Seconds())
	return errors.Join(errs...)
}

// packages counts the packages of a go test.
func packages(command []string) (int, error) {
	args := []string{"list"}
	for i, arg := range command {
		switch {
		case arg == "-C":
			args = append([]string{"-C", command[i+1]}, args...)
		case strings.HasPrefix(arg, "./") || arg == ".":
			args = append(args, arg)
		}
	}
	out, err := exec.Command("go", args...).Output()
	return strings.Count(string(out), "\n"), err
}

// one runs a command, and returns its CPU time.
func (r *results) one(command []string, tests bool, cpu string, events io.Writer) (time.Duration,
	error) {
	if self, err := os.Executable(); tests && err == nil {
		at := slices.Index(command, "-C") + 2 // go test demands -C first
		at = max(at, 2)
		command = slices.Insert(slices.Clone(command), at, "-json", "-exec", self+" -cpu "+cpu+" --")
	}
	c := exec.Command(command[0], command[1:]...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return 0, err
	}
	for lines := bufio.NewReader(out); err == nil; {
		var line []byte
		line, err = lines.ReadBytes('\n')
		if !tests {
			_, _ = os.Stdout.Write(line)
			r.count(string(line))
			continue
		}
		_, _ = events.Write(line)
		r.event(line)
	}
	err = c.Wait()
	return c.ProcessState.UserTime() + c.ProcessState.SystemTime(), err
}

// elsewhere matches how many tests another program, or another target, reports.
var elsewhere = regexp.MustCompile(`^(?:Ran (\d+) of |FIGURE loop .* tests=(\d+))`)

func (r *results) count(line string) {
	if m := elsewhere.FindStringSubmatch(line); m != nil {
		n, _ := strconv.Atoi(cmp.Or(m[1], m[2]))
		r.tests += n
	}
}

// measured runs a test binary in the place of go test. A signal that go test sends is for the
// binary.
func measured(file string, args []string) error {
	c := exec.Command(args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT)
	if err := c.Start(); err != nil {
		return err
	}
	go func() {
		for s := range signals {
			if s != os.Interrupt { // the terminal sends it to both
				_ = c.Process.Signal(s)
			}
		}
	}()
	result := c.Wait()
	dir, err := os.Getwd()
	if err != nil {
		return errors.Join(result, err)
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return errors.Join(result, err)
	}
	_, err = fmt.Fprintf(f, "%s %.2f\n", dir, (c.ProcessState.UserTime() +
		c.ProcessState.SystemTime()).Seconds())
	return errors.Join(result, err, f.Close())
}
