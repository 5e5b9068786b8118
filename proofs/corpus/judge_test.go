//go:build linux

package corpus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// verdict is the result of a trial.
type verdict struct {
	Outcome outcome
	Answer  error
	// Wrong describes the fault, or is nil if there is none.
	Wrong error
	// Overwritten is set if the disk was not blank and was changed.
	Overwritten bool
}

// setupViolation describes a fault of the driver during the preparation of a trial.
type setupViolation string

func (m setupViolation) Error() string { return string(m) }

// try runs a trial. The error means that the trial could not be made.
func (b *bench) try(ctx context.Context, t *trial) (v verdict, err error) {
	f, err := b.newFixture(ctx, t)
	if f != nil {
		defer func() {
			f.keep = b.evidence && (err != nil || v.Wrong != nil)
			b.kept = b.kept || f.keep
			if f.keep {
				v.Wrong = errors.Join(v.Wrong, fmt.Errorf("see %s", f.dir))
			}
			err = errors.Join(err, f.end())
		}()
	}
	if errors.As(err, new(setupViolation)) {
		return verdict{Wrong: err}, nil
	}
	if err != nil {
		return v, err
	}
	defer harness.Catch(&err)
	before := f.digest()
	if slices.Equal(t.Want.Reasons, []string{notBlank}) && t.Set == nil && before == f.image.blank() {
		return v, errors.New("the trial wants a refusal because of the disk's content, and it is blank")
	}
	v.Answer = f.stage(ctx)
	if f.happened != nil {
		if err := f.happened(); err != nil {
			return v, fmt.Errorf("%w (%w)", err, v.Answer)
		}
	}
	v.Outcome, v.Wrong = f.judge(before, v.Answer)
	if v.Outcome == formatted {
		v.Overwritten = t.Want.Outcome != formatted
	}
	if decoyErr := f.untouchedDecoy(); decoyErr != nil {
		v.Wrong = errors.Join(v.Wrong, decoyErr)
		v.Overwritten = true
	}
	if t.Check != nil {
		v.Wrong = errors.Join(v.Wrong, f.checked())
	}
	if v.Answer == nil {
		if err := f.unstage(ctx); err != nil {
			v.Wrong = errors.Join(v.Wrong, fmt.Errorf("the volume cannot be unstaged: %w", err))
		}
	}
	if harm := b.Bystanders.Harm(); harm != nil {
		v.Wrong = errors.Join(v.Wrong, harm)
		v.Overwritten = true
	}
	return v, nil
}

// checked returns the result of the trial's own check.
func (f *fixture) checked() (err error) {
	defer harness.Catch(&err)
	return f.Check(f)
}

// digest returns the hash of the bytes that a refused disk must keep.
func (f *fixture) digest() string {
	harness.Must(f.loop.Sync())
	return f.image.digest(0, f.Until)
}

// judge determines the outcome of the call and compares it with the wanted one.
func (f *fixture) judge(before string, answer error) (outcome, error) {
	harness.Must(f.loop.Sync())
	if answer != nil {
		after := f.digest()
		switch {
		case after != before && !f.Want.Begun:
			return formatted, fmt.Errorf("the disk was written (%s, now %s), and the answer is %w",
				before, after, answer)
		case f.Want.Outcome != refused && f.Want.Outcome != either:
			return refused, fmt.Errorf("want it %s, got %w", f.Want.Outcome, answer)
		}
		return refused, f.judgeRefusal(status.Convert(answer))
	}
	got, err := f.judgeMount()
	if err == nil && got != f.Want.Outcome && (got != mounted || f.Want.Outcome != either) {
		err = fmt.Errorf("want it %s, got it %s", f.Want.Outcome, got)
	}
	return got, err
}

// judgeMount inspects the mount that the call has made. A filesystem with the payload is an old
// one.
func (f *fixture) judgeMount() (outcome, error) {
	m, err := f.staged()
	switch {
	case err != nil:
		return "", err
	case m == nil:
		return "", errors.New("the answer was OK, and nothing is mounted")
	case harness.MountedNumber(m) != fmt.Sprintf("%d:%d", f.loop.Major, f.loop.Minor):
		return mounted, fmt.Errorf("%s (%d:%d) is mounted, another disk than %s", m.Source, m.Major,
			m.Minor, f.loop.Path)
	case m.FSType != f.FS:
		return mounted, fmt.Errorf("a %s is mounted, not a %s", m.FSType, f.FS)
	}
	names, err := entries(f.Staging)
	if err != nil {
		return "", err
	}
	if slices.Contains(names, payloadName) {
		got, err := os.ReadFile(filepath.Join(f.Staging, payloadName))
		if err == nil && !bytes.Equal(got, f.bench.bases.payload) {
			err = errors.New("the filesystem's file has other bytes than it had")
		}
		return mounted, err
	}
	if len(names) > 0 {
		return formatted, fmt.Errorf("the new filesystem contains %q", names)
	}
	return formatted, os.WriteFile(filepath.Join(f.Staging, "new"), []byte("new"), 0o600)
}

// entries lists a directory without the entries that mkfs makes.
func entries(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	var names []string
	for _, e := range list {
		if e.Name() != "lost+found" {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func (f *fixture) judgeRefusal(answer *status.Status) error {
	w, message := f.Want, answer.Message()
	code := codes.FailedPrecondition.String()
	if w.Code != "" {
		code = w.Code
	}
	if answer.Code().String() != code {
		return fmt.Errorf("want %s, got %w", code, answer.Err())
	}
	reason, sentence, _ := strings.Cut(message, ": ")
	if !slices.Contains(w.Reasons, reason) {
		return fmt.Errorf("want a reason of %q, got %q", w.Reasons, message)
	}
	for _, words := range w.Says {
		if !strings.Contains(sentence, words) {
			return fmt.Errorf("the evidence does not contain %q: %q", words, message)
		}
	}
	if reason != notBlank && w.Outcome != either {
		return nil
	}
	named := slices.ContainsFunc(w.Names, func(name string) bool {
		return strings.Contains(strings.ToLower(sentence), strings.ToLower(name))
	})
	place, err := f.judgePlaces(sentence)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %q", err, message)
	case !named && (!place || w.Outcome == either):
		return fmt.Errorf("the evidence has neither one of %q nor a place: %q", w.Names, message)
	}
	return nil
}

var place = regexp.MustCompile(`offset (\d+)`)

// judgePlaces returns an error unless the disk is not zero at the places that the evidence names.
func (f *fixture) judgePlaces(sentence string) (named bool, err error) {
	for _, m := range place.FindAllStringSubmatch(sentence, -1) {
		offset, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil || offset >= f.image.Size {
			return false, fmt.Errorf("the evidence names offset %s of a disk of %d bytes", m[1],
				f.image.Size)
		}
		at := offset &^ (512 - 1)
		sector := f.image.read(at, min(512, f.image.Size-at))
		if bytes.Count(sector, []byte{0}) == len(sector) {
			return false, fmt.Errorf("the evidence names offset %d, where all is zero", offset)
		}
		named = true
	}
	return named, nil
}

func (f *fixture) untouchedDecoy() error {
	return proof.EachData(f.decoy.Path, func(at int64, b []byte) error {
		if i := slices.IndexFunc(b, func(c byte) bool { return c != 0 }); i >= 0 {
			return fmt.Errorf("another disk was written, at offset %d", at+int64(i))
		}
		return nil
	})
}
