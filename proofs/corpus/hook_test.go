//go:build linux

package corpus_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// wrap replaces a program that the driver runs by a shell script, in which "$real" is the
// program. The end of the fixture, or the returned function, removes the script.
func (f *fixture) wrap(program, script string) (unwrap func() error, err error) {
	real, err := exec.LookPath(program)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(f.bench.Bin, program)
	text := fmt.Sprintf("#!/bin/sh\nreal='%s'\n%s\n", real, script)
	unwrap = func() error { return os.RemoveAll(path) }
	f.atEnd(unwrap)
	return unwrap, os.WriteFile(path, []byte(text), 0o755)
}

// hook calls do when the driver starts the program on a disk for the first time, before the program
// does anything. So the trial always wins a race that the driver can lose. The answer of the call
// shows the consequence, and the fixture checks that do was called.
func (f *fixture) hook(program string, do func() error) error {
	ask, answer := filepath.Join(f.dir, program+".ask"), filepath.Join(f.dir, program+".answer")
	if err := errors.Join(unix.Mkfifo(ask, 0o600), unix.Mkfifo(answer, 0o600)); err != nil {
		return err
	}
	// A FIFO that is opened for both directions neither waits for its other end nor reports that
	// the other end was closed.
	questions, err1 := os.OpenFile(ask, os.O_RDWR|unix.O_NONBLOCK, 0)
	answers, err2 := os.OpenFile(answer, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	happened := make(chan error, 1)
	go func() {
		b := make([]byte, 1)
		for first := true; ; first = false {
			if _, err := questions.Read(b); err != nil {
				return
			}
			if first {
				happened <- do()
			}
			if _, err := answers.Write(b); err != nil {
				return
			}
		}
	}()
	f.atEnd(func() error { return errors.Join(questions.Close(), answers.Close()) })
	f.happened = func() error {
		select {
		case err := <-happened:
			return err
		default:
			return fmt.Errorf("the driver did not run %s, so what was to happen then did not", program)
		}
	}
	_, err := f.wrap(program, fmt.Sprintf("case $* in */fd/*|*/dev/*) printf . >'%s'; "+
		"head -c 1 <'%s' >/dev/null;; esac\nexec \"$real\" \"$@\"", ask, answer))
	return err
}
