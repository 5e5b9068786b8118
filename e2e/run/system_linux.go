package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
)

// free returns the free bytes on the filesystem of dir or, if dir is missing, of an ancestor.
func free(dir string) (int64, error) {
	for {
		var fs syscall.Statfs_t
		err := syscall.Statfs(dir, &fs)
		if err == nil {
			return int64(fs.Bavail) * fs.Bsize, nil
		}
		if !errors.Is(err, syscall.ENOENT) || filepath.Dir(dir) == dir {
			return 0, fmt.Errorf("find out how much fits into %s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

func mountFlags(dir string) (int64, error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return 0, fmt.Errorf("find out whether device nodes work in %s: %w", dir, err)
	}
	return fs.Flags, nil
}

func suiteAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
