//go:build !linux

package kube

import "os/exec"

// runMortal runs a command. On this system it may outlive this process for one request, which does
// no harm because of its preconditions.
func runMortal(cmd *exec.Cmd) error { return cmd.Run() }
