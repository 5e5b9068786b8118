//go:build !linux

package namespace

import (
	"errors"
	"os"
)

// Enter returns an error, because mount namespaces need Linux.
func Enter() error { return errors.New("mount namespaces need Linux: run it there") }

// Main runs the tests. Each test that needs a mount namespace reports that it needs Linux.
func Main(m interface{ Run() int }) { os.Exit(m.Run()) }
