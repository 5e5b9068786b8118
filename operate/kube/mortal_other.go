//go:build !linux

package kube

import "os/exec"

// runMortal runs kubectl. On this system kubectl may outlive this process for one request, which
// does no harm because of its preconditions.
func runMortal(cmd *exec.Cmd) error { return cmd.Run() }
