// Testrun runs the commands of a make target, shows how far they are, and ends with a summary and a
// figure. A command that is "go test" runs with -json, and of "go build" the compiled packages are
// counted; the output of others is shown as it is. A command that fails ends the run, unless it is a
// test. An interrupt ends the command that runs, and then the run.
//
//	testrun -target test -- go build ./cmd/... -- env CGO_ENABLED=0 go test -short ./...
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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends that has started the process
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

// run runs commands one after the other.
func run(target string, since time.Time, cold bool, commands [][]string) error {
	interrupted := make(chan os.Signal, 1) // the terminal interrupts the command, too
	signal.Notify(interrupted, os.Interrupt)
	cpu, err := filepath.Abs(kept(target, "cpu"))
	if err == nil {
		err = os.MkdirAll(filepath.Dir(cpu), 0o755)
	}
	figures := filepath.Join(filepath.Dir(cpu), target+".figures")
	for _, file := range []string{cpu, figures} {
		if err == nil {
			err = os.WriteFile(file, nil, 0o644)
		}
	}
	if err == nil {
		err = os.Setenv("PROOF_FIGURES", figures)
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
	for _, command := range commands {
		if goes(command, "test") {
			n, err := packages(command)
			if err != nil {
				return fmt.Errorf("list the packages of %q: %w", command, err)
			}
			r.of += n
		}
	}
	var failed error
	var used time.Duration
	for _, command := range commands {
		took, err := r.one(command, cpu, events)
		used += took
		failed = errors.Join(failed, err)
		if err != nil && !goes(command, "test") || len(interrupted) > 0 {
			break
		}
	}
	r.summarize(target)
	if text, err := os.ReadFile(figures); err == nil {
		_, _ = os.Stdout.Write(text)
	}
	key := "warm_s"
	if cold {
		key = "cold_s"
	}
	fmt.Printf("FIGURE loop target=%s %s=%.0f tests=%d cpu_s=%.0f\n", target, key,
		time.Since(since).Seconds(), r.tests, used.Seconds())
	return failed
}

// goes reports whether a command, behind the variables of env, is this one of go's.
func goes(command []string, verb string) bool {
	at := slices.Index(command, "go")
	return at >= 0 && (at == 0 || command[0] == "env") && slices.Contains(command[at:], verb) &&
		!slices.Contains(command, "-v") // somebody reads its output
}

// packages counts the packages of a go test.
func packages(command []string) (int, error) {
	list := exec.Command("go", "list")
	list.Stderr = os.Stderr
	for i, arg := range command {
		switch {
		case arg == "-C":
			list.Dir = command[i+1]
		case strings.HasPrefix(arg, "./") || arg == ".":
			list.Args = append(list.Args, arg)
		}
	}
	out, err := list.Output()
	return strings.Count(string(out), "\n"), err
}

// one runs a command, and returns its CPU time.
func (r *results) one(command []string, cpu string, events io.Writer) (time.Duration, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	tests, builds := goes(command, "test"), goes(command, "build")
	if verb := max(slices.Index(command, "test"), slices.Index(command, "build")); tests {
		command = slices.Insert(slices.Clone(command), verb+1, "-json", "-exec="+self+" -cpu "+cpu)
	} else if builds {
		command = slices.Insert(slices.Clone(command), verb+1, "-v")
	}
	c := exec.Command(command[0], command[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	var out io.Reader
	if builds {
		out, err = c.StderrPipe()
	} else {
		c.Stderr = os.Stderr
		out, err = c.StdoutPipe()
	}
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return 0, err
	}
	for lines := bufio.NewReader(out); err == nil; {
		var line []byte
		line, err = lines.ReadBytes('\n')
		switch {
		case tests:
			_, _ = events.Write(line)
			r.event(line)
		case builds:
			r.compiled(string(line))
		default:
			_, _ = os.Stdout.Write(line)
			r.count(string(line))
		}
	}
	err = c.Wait()
	return c.ProcessState.UserTime() + c.ProcessState.SystemTime(), err
}

// compiled counts a package that was compiled. Anything else that go build prints is for the reader.
func (r *results) compiled(line string) {
	if name := strings.TrimSpace(line); strings.ContainsAny(name, " :") {
		if !strings.HasPrefix(line, "go: downloading ") {
			fmt.Fprint(r.out, line)
			return
		}
		r.downloads++
	} else if name != "" {
		r.packages++
	}
	if time.Since(r.said) > 10*time.Second {
		r.said = time.Now()
		fmt.Fprintf(r.out, "[%d packages compiled, %d modules downloaded, %s]\n", r.packages,
			r.downloads, time.Since(r.since).Round(time.Second))
	}
}

// elsewhere matches how many tests another program, or another target, reports.
var elsewhere = regexp.MustCompile(
	`^(?:(?:\x1b\[[\d;]*m)*Ran (?:\x1b\[[\d;]*m)*(\d+) of ` +
		`|FIGURE loop .* tests=(\d+)|FIGURE sanity specs=(\d+))`)

func (r *results) count(line string) {
	if m := elsewhere.FindStringSubmatch(line); m != nil {
		n, _ := strconv.Atoi(cmp.Or(m[1], m[2], m[3]))
		r.tests += n
	}
}

// measured runs a test binary in the place of go test. A signal that go test sends is for the
// binary.
func measured(file string, args []string) error {
	c := exec.Command(args[0], args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG,
		uintptr(syscall.SIGTERM), 0)
	if errno != 0 {
		return errno
	}
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
	if status, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(args[0]), c.ProcessState)
	}
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
