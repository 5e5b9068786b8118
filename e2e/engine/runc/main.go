// Command runc runs instead of runc on a machine whose bounding set lacks CAP_SYS_RESOURCE, such as
// some virtual machines and containers. For a privileged container Docker requests every
// capability, and the kernel then refuses the whole set. This program removes that one capability
// from the request and then executes the runc of the PATH.
package main

import (
	"fmt"
	"os"
	"os/exec"
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
		return fmt.Errorf("find the runc to become: %w", err)
	}
	return fmt.Errorf("become %s: %w", runc, syscall.Exec(runc, args, os.Environ()))
}

// edit removes the capability from the file. A file without capabilities stays unchanged.
func edit(file string, at []string) error {
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("read what is asked for: %w", err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read what is asked for: %w", err)
	}
	after, err := without(before, at, "CAP_SYS_RESOURCE")
	if err != nil {
		return fmt.Errorf("take CAP_SYS_RESOURCE out of %s: %w", file, err)
	}
	if err := os.WriteFile(file, after, info.Mode().Perm()); err != nil {
		return fmt.Errorf("take CAP_SYS_RESOURCE out of %s: %w", file, err)
	}
	return nil
}
