//go:build !linux

package proof

import (
	"errors"
	"syscall"
)

func namespaceAttr() *syscall.SysProcAttr { return nil }

// LeaveMountsOfOthers needs Linux.
func LeaveMountsOfOthers() error { return errors.New("mount namespaces need Linux") }
