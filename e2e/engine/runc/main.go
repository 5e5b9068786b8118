// Command runc replaces runc on machines, such as some virtual machines, whose bounding set lacks
// CAP_SYS_RESOURCE. Docker requests every capability for a privileged container, and the kernel
// refuses the request as a whole if it cannot grant one of them. This program removes this
// capability from the request, and executes the runc in the PATH.
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
	if file := requestFile(args[1:]); file != "" {
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

// capability matches "CAP_SYS_RESOURCE" in a JSON list, with one comma beside it.
var capability = regexp.MustCompile(`"CAP_SYS_RESOURCE"\s*,|,?\s*"CAP_SYS_RESOURCE"`)

// edit removes "CAP_SYS_RESOURCE" from all lists in a JSON file, and changes no other byte.
func edit(file string) error {
	document, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, capability.ReplaceAll(document, nil), 0)
}

// takesValue lists the flags of runc that have a value: flags that dockerd sets before the command,
// and flags that name a file. requestFile must not mistake such a value for the command.
var takesValue = []string{"root", "log", "log-format", "criu", "rootless",
	"bundle", "b", "process", "p"}

// requestFile returns the JSON file in which a runc command line requests capabilities, or "" if
// the command starts no process.
func requestFile(args []string) (file string) {
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
		// Without --process the new process gets the container's capabilities.
		return values["process"] + values["p"]
	}
	return ""
}
