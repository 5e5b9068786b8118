//go:build !linux

package main

import (
	"errors"
	"syscall"
)

func free(string) (int64, error) {
	return 0, errors.New("the cluster needs Linux; run this on a Linux machine")
}

func mountFlags(string) (int64, error) { return free("") }

func suiteAttr() *syscall.SysProcAttr { return nil }
