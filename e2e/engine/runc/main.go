// Command runc runs instead of runc on a machine whose bounding set lacks CAP_SYS_RESOURCE, such as
// some virtual machines and containers. For a privileged container Docker requests every
// capability, and the kernel then refuses the whole set. This program removes that one capability
// from the request and then executes the runc of the PATH.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "runc without CAP_SYS_RESOURCE:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if file := asked(args[1:]); file != "" {
		if err := edit(file); err != nil {
			return fmt.Errorf("remove CAP_SYS_RESOURCE: %w", err)
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return fmt.Errorf("find runc: %w", err)
	}
	return fmt.Errorf("execute %s: %w", runc, syscall.Exec(runc, args, os.Environ()))
}

// capability matches the capability in a JSON list, with the comma after it or before it.
var capability = regexp.MustCompile(`"CAP_SYS_RESOURCE"\s*,|,?\s*"CAP_SYS_RESOURCE"`)

// edit removes the capability from a file, wherever it is a text. All other bytes stay the same.
func edit(file string) error {
	document, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, capability.ReplaceAll(document, nil), 0)
}

// takesValue contains flags of runc that have a value: those that an engine sets before the
// command, whose value must not be read as the command, and those that name a file.
var takesValue = []string{"root", "log", "log-format", "criu", "rootless",
	"bundle", "b", "process", "p"}

// asked returns the file in which a runc command line requests capabilities. It returns "" for
// commands that start no process.
func asked(args []string) (file string) {
	command := ""
	values := map[string]string{}
	for i := 0; i < len(args); i++ {
		name, value, hasValue := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		switch {
		case !strings.HasPrefix(args[i], "-") && command == "":
			command = args[i]
		case hasValue:
			values[name] = value
		case slices.Contains(takesValue, name) && i+1 < len(args):
			i++
			values[name] = args[i]
		}
	}
	switch command {
	case "create", "run":
		return filepath.Join(values["bundle"]+values["b"], "config.json")
	case "exec":
		// A process in a file may request capabilities; one on the command line has the container's.
		return values["process"] + values["p"]
	}
	return ""
}
