//go:build !linux

package kube

import "os/exec"

// runMortal runs a command. Here it may outlive this process for one request, which its
// preconditions make harmless.
func runMortal(cmd *exec.Cmd) error { return cmd.Run() }
