//go:build !linux

package kube

import "os/exec"

// runMortal runs kubectl. If this process dies, kubectl may still complete its request. That is
// harmless: the request names the UID and resourceVersion of the object that it changes.
func runMortal(cmd *exec.Cmd) error { return cmd.Run() }
