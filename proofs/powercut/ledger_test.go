//go:build linux

package powercut_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// promise describes the possible contents of a file, or of a range of a raw volume: one of
// several contents, of which nil means that there is no such file; or any content, while it is
// written; or forged records.
type promise struct {
	anything bool
	forged   *[sha256.Size]byte
	contents [][]byte
}

// event is an event that happened while a log was recorded. Its number is in a note of the
// log.
type event struct {
	// promises are the new promises, by name.
	promises map[string]promise
	// staged means that NodeStageVolume has answered OK.
	staged bool
}

// ledger contains the promises to a workload at each point of a log.
type ledger struct {
	// first contains the promises from before the log.
	first  map[string]promise
	events []event
}

// at returns the promises after that number of events, and whether the volume was staged.
func (l *ledger) at(events int) (promises map[string]promise, staged bool) {
	promises = maps.Clone(l.first)
	if promises == nil {
		promises = map[string]promise{}
	}
	for _, e := range l.events[:events] {
		maps.Copy(promises, e.promises)
		staged = staged || e.staged
	}
	return promises, staged
}

// note returns the text of an event in a log.
func note(number int) string { return strconv.Itoa(number) }

// checkFiles returns an error unless the files of a directory are as promised. It counts the
// files with forged records.
func checkFiles(dir string, promises map[string]promise, forged *proof.Invariant) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(promises)) {
		want := promises[name]
		if want.forged != nil {
			errs = append(errs, forged.Checked(proof.CheckForged(filepath.Join(dir, name), *want.forged)))
			continue
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			got, err = nil, nil
		} else if got == nil {
			got = []byte{}
		}
		if err == nil && !want.anything && !slices.ContainsFunc(want.contents, func(c []byte) bool {
			return bytes.Equal(c, got) && (c == nil) == (got == nil)
		}) {
			err = fmt.Errorf("%s has %s, which is none of the %d contents that it may have", name,
				describe(got), len(want.contents))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func describe(content []byte) string {
	if content == nil {
		return "gone"
	}
	return fmt.Sprintf("%d bytes", len(content))
}

// checkRanges returns an error unless the ranges of a raw volume, named by their offsets, are
// as promised.
func checkRanges(device *os.File, promises map[string]promise) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(promises)) {
		want := promises[name]
		if want.anything {
			continue
		}
		offset, err := strconv.ParseInt(name, 10, 64)
		got := make([]byte, len(want.contents[0]))
		if err == nil {
			_, err = device.ReadAt(got, offset)
		}
		if err == nil && !bytes.Equal(got, want.contents[0]) {
			err = fmt.Errorf("the range at %s is not what was written", name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
