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
)

// verdict is what came out of a trial.
type verdict struct {
	Outcome outcome
	Answer  error
	// Wrong says what should not have been; nil when all is well.
	Wrong error
	// Overwritten says that the disk was not blank and is not what it was.
	Overwritten bool
}

// misdeed is what the driver did wrong while a trial was prepared.
type misdeed string

func (m misdeed) Error() string { return string(m) }

// try runs a trial to its end. The error is about the trial itself: it could not be made.
func (b *bench) try(ctx context.Context, t *trial) (v verdict, err error) {
	s, err := b.newScene(ctx, t)
	if s != nil {
		defer func() {
			s.kept = b.evidence && (err != nil || v.Wrong != nil)
			b.kept = b.kept || s.kept
			if s.kept {
				v.Wrong = errors.Join(v.Wrong, fmt.Errorf("see %s", s.dir))
			}
			err = errors.Join(err, s.end())
		}()
	}
	if errors.As(err, new(misdeed)) {
		return verdict{Wrong: err}, nil
	}
	if err != nil {
		return v, err
	}
	if err := s.loop.Sync(); err != nil {
		return v, err
	}
	before, err := digest(s.image.Path, t.KernelWrites)
	if err != nil {
		return v, err
	}
	if slices.Equal(t.Want.Reasons, []string{notBlank}) && t.Set == nil && before == s.image.blank() {
		return v, errors.New("the disk is to be refused for what it holds, and it is blank")
	}
	v.Answer = s.stage(ctx)
	if s.happened != nil {
		if err := s.happened(); err != nil {
			return v, fmt.Errorf("%w (%w)", err, v.Answer)
		}
	}
	v.Outcome, v.Wrong = s.judge(before, v.Answer)
	if v.Outcome == formatted {
		v.Overwritten = t.Want.Outcome != formatted
	}
	if decoyErr := s.untouchedDecoy(); decoyErr != nil {
		v.Wrong = errors.Join(v.Wrong, decoyErr)
		v.Overwritten = true
	}
	if t.Check != nil {
		v.Wrong = errors.Join(v.Wrong, t.Check(s))
	}
	if v.Answer == nil {
		if err := s.unstage(ctx); err != nil {
			v.Wrong = errors.Join(v.Wrong, fmt.Errorf("the volume cannot be unstaged: %w", err))
		}
	}
	return v, nil
}

// judge finds out what the call did, and compares it with what was wanted.
func (s *scene) judge(before string, answer error) (outcome, error) {
	if err := s.loop.Sync(); err != nil {
		return "", err
	}
	if answer != nil {
		after, err := digest(s.image.Path, s.KernelWrites)
		switch {
		case err != nil:
			return "", err
		case after != before && !s.Want.Begun:
			return formatted, fmt.Errorf("the disk was written (%s, now %s), and the answer is %w",
				before, after, answer)
		case s.Want.Outcome != refused:
			return refused, fmt.Errorf("want it %s, got %w", s.Want.Outcome, answer)
		}
		return refused, s.judgeRefusal(status.Convert(answer))
	}
	got, err := s.judgeMount()
	if err == nil && got != s.Want.Outcome {
		err = fmt.Errorf("want it %s, got it %s", s.Want.Outcome, got)
	}
	return got, err
}

// judgeMount looks at what the call has mounted. The payload tells an old filesystem from a new
// one.
func (s *scene) judgeMount() (outcome, error) {
	m, err := s.staged()
	switch {
	case err != nil:
		return "", err
	case m == nil:
		return "", errors.New("the answer was OK, and nothing is mounted")
	case !shows(m, s.loop):
		return mounted, fmt.Errorf("%s (%d:%d) is mounted, another disk than %s", m.Source, m.Major,
			m.Minor, s.loop.Path)
	case m.FSType != s.FS:
		return mounted, fmt.Errorf("a %s is mounted, not a %s", m.FSType, s.FS)
	}
	names, err := entries(s.Staging)
	if err != nil {
		return "", err
	}
	if slices.Contains(names, payloadName) {
		got, err := os.ReadFile(filepath.Join(s.Staging, payloadName))
		if err == nil && !bytes.Equal(got, s.bench.bases.payload) {
			err = errors.New("the filesystem's file has other bytes than it had")
		}
		return mounted, err
	}
	if len(names) > 0 {
		return formatted, fmt.Errorf("the new filesystem holds %q", names)
	}
	return formatted, os.WriteFile(filepath.Join(s.Staging, "new"), []byte("first words"), 0o600)
}

// entries lists a directory without what mkfs puts there.
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

// judgeRefusal demands code, reason and evidence.
func (s *scene) judgeRefusal(answer *status.Status) error {
	w, message := s.Want, answer.Message()
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
			return fmt.Errorf("the evidence does not say %q: %q", words, message)
		}
	}
	if reason != notBlank {
		return nil
	}
	named := slices.ContainsFunc(w.Names, func(name string) bool {
		return strings.Contains(strings.ToLower(sentence), strings.ToLower(name))
	})
	place, err := s.judgePlaces(sentence)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %q", err, message)
	case !named && !place:
		return fmt.Errorf("the evidence says neither what (%q) nor where: %q", w.Names, message)
	}
	return nil
}

var place = regexp.MustCompile(`offset (\d+)`)

// judgePlaces looks at the places that the evidence names: what it says of the disk must be true.
func (s *scene) judgePlaces(sentence string) (named bool, err error) {
	for _, m := range place.FindAllStringSubmatch(sentence, -1) {
		offset, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil || offset >= s.image.Size {
			return false, fmt.Errorf("the evidence names offset %s of a disk of %d bytes", m[1],
				s.image.Size)
		}
		at := offset &^ (512 - 1)
		sector := s.image.read(at, min(512, s.image.Size-at))
		if s.image.err != nil {
			return false, s.image.err
		}
		if bytes.Equal(sector, zeroPage[:len(sector)]) {
			return false, fmt.Errorf("the evidence names offset %d, where all is zero", offset)
		}
		named = true
	}
	return named, nil
}

// untouchedDecoy demands that the other disk is as it was: blank.
func (s *scene) untouchedDecoy() error {
	return eachData(s.decoy.Path, func(at int64, b []byte) error {
		if i := slices.IndexFunc(b, func(c byte) bool { return c != 0 }); i >= 0 {
			return fmt.Errorf("another disk was written, at offset %d", at+int64(i))
		}
		return nil
	})
}
