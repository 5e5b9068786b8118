// Command runc runs instead of runc on a machine whose bounding set lacks CAP_SYS_RESOURCE, such as
// some virtual machines and containers. For a privileged container Docker requests every
// capability, and the kernel then refuses the whole set. This program removes that one capability
// from the request and then executes the runc of the PATH.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	if file, at, ok := asked(args[1:]); ok {
		if err := edit(file, at); err != nil {
			return err
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return fmt.Errorf("find runc: %w", err)
	}
	return fmt.Errorf("execute %s: %w", runc, syscall.Exec(runc, args, os.Environ()))
}

// edit removes the capability from the file. A file without capabilities stays unchanged.
func edit(file string, at []string) error {
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("read the requested capabilities: %w", err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the requested capabilities: %w", err)
	}
	after, err := without(before, at, "CAP_SYS_RESOURCE")
	if err == nil {
		err = os.WriteFile(file, after, info.Mode().Perm())
	}
	if err != nil {
		return fmt.Errorf("remove CAP_SYS_RESOURCE from %s: %w", file, err)
	}
	return nil
}

// takesValue contains flags of runc that have a value: those that an engine sets before the
// command, whose value must not be read as the command, and those that name a file.
var takesValue = []string{"root", "log", "log-format", "criu", "rootless",
	"bundle", "b", "process", "p"}

// asked returns the file in which a runc command line requests capabilities, and the path of the
// capabilities in that file. Only commands that start a process request any.
func asked(args []string) (file string, at []string, ok bool) {
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
		bundle := values["bundle"] + values["b"]
		return filepath.Join(bundle, "config.json"), []string{"process", "capabilities"}, true
	case "exec":
		// A process in a file may request capabilities; one on the command line has the container's.
		if process := values["process"] + values["p"]; process != "" {
			return process, []string{"capabilities"}, true
		}
	}
	return "", nil, false
}

// without returns the document without the capability in the lists of the object at the path. All
// other bytes stay the same.
func without(document []byte, path []string, capability string) ([]byte, error) {
	if len(path) > 0 {
		object := map[string]json.RawMessage{}
		if err := json.Unmarshal(document, &object); err != nil {
			return nil, err
		}
		inner, ok := object[path[0]]
		if !ok || string(inner) == "null" {
			return document, nil
		}
		changed, err := without(inner, path[1:], capability)
		if err != nil {
			return nil, err
		}
		object[path[0]] = changed
		return json.Marshal(object)
	}
	sets := map[string][]string{}
	if err := json.Unmarshal(document, &sets); err != nil {
		return nil, err
	}
	for name, set := range sets {
		sets[name] = slices.DeleteFunc(set, func(c string) bool { return c == capability })
	}
	return json.Marshal(sets)
}
