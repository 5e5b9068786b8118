package rack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// TokenSource provides the rack's token: a fixed one, or one from a file that somebody renews.
type TokenSource struct {
	Fixed string
	Path  string
	// OnToken receives every token before it is sent, so that it can be redacted; may be nil.
	OnToken func(token string)
	Log     *slog.Logger
	// Limit is how long a caller waits for the file; 0 means fileLimit.
	Limit time.Duration

	once sync.Once
	file *renewedFile[string]
}

func (s *TokenSource) renewed() *renewedFile[string] {
	s.once.Do(func() {
		s.file = &renewedFile[string]{path: s.Path, log: s.Log, limit: cmp.Or(s.Limit, fileLimit),
			parse: func(content []byte) (string, error) {
				token := string(bytes.TrimSpace(content))
				err := CheckToken(token)
				if err == nil && s.OnToken != nil {
					s.OnToken(token)
				}
				return token, err
			}}
	})
	return s.file
}

// current returns the token to send. It reads the file again if the file has changed; if that fails
// it returns the token read last.
func (s *TokenSource) current(ctx context.Context) (string, error) { return s.get(ctx, false) }

// refresh reads the file again after the rack has refused the token, because the file may have a
// new token and the same times.
func (s *TokenSource) refresh(ctx context.Context) (string, error) { return s.get(ctx, true) }

func (s *TokenSource) get(ctx context.Context, force bool) (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	return s.renewed().get(ctx, force)
}

// Fault returns the error of the file that a person has to repair, or nil. Calls continue with the
// token that was read last.
func (s *TokenSource) Fault() error {
	if s == nil || s.Path == "" {
		return nil
	}
	err := s.renewed().fault()
	if err == nil {
		return nil
	}
	return csierr.New(csierr.TokenFileUnreadable, "OXIDE_TOKEN_FILE (--token-file): %s; the token "+
		"last read is in use until the rack refuses it", err)
}

// CheckToken returns why a token cannot be sent, or nil. It does not ask the rack.
func CheckToken(token string) error {
	const most = 4096
	noWord := func(r rune) bool { return r <= ' ' || r > '~' }
	switch {
	case token == "":
		return errors.New("holds no token")
	case len(token) > most || strings.ContainsFunc(token, noWord):
		return errors.New("holds no valid token: a token is one word of ASCII characters")
	}
	return nil
}

// renewedFile is a file that somebody renews, and the value that was read from it.
type renewedFile[T any] struct {
	path  string
	limit time.Duration // how long a caller waits for the file
	log   *slog.Logger
	parse func(content []byte) (T, error)

	mu sync.Mutex
	// guarded by mu
	value T
	// guarded by mu: the file that held value; nil if none has
	file os.FileInfo
	// guarded by mu: the error of the last reading
	problem error
	// guarded by mu: whether the last reading was slow and failed
	slow bool
	// guarded by mu: the reading in progress
	reading *reading
}

// fileLimit is the default of TokenSource.Limit.
const fileLimit = 3 * time.Second

type reading struct {
	force bool // reads the file even if it is unchanged
	began time.Time
	done  chan struct{} // closed at the end
}

// get waits for a reading, but no longer than the limit, because on a mount that hangs not even
// stat returns.
func (s *renewedFile[T]) get(ctx context.Context, force bool) (value T, err error) {
	asked := time.Now()
	for {
		r, wait := s.begin(force)
		if !wait || !s.await(ctx, r) || !force || r.force && !r.began.Before(asked) {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return value, cmp.Or(s.lastError(), ctx.Err())
	}
	return s.value, nil
}

// begin begins a reading, or joins the one in progress: a file that blocks has one reader, since a
// system call on a mount that hangs cannot be canceled. wait reports whether to wait for it: after
// a slow and failed reading, only a caller without an earlier value waits.
func (s *renewedFile[T]) begin(force bool) (r *reading, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reading == nil {
		r := &reading{force: force, began: time.Now(), done: make(chan struct{})}
		s.reading = r
		async.Detach(func() { s.read(r) })
	}
	return s.reading, force || s.file == nil || !s.slow
}

func (s *renewedFile[T]) await(ctx context.Context, r *reading) bool {
	limit := time.NewTimer(time.Until(r.began.Add(s.limit)))
	defer limit.Stop()
	select {
	case <-r.done:
		return true
	case <-limit.C:
	case <-ctx.Done():
	}
	return false
}

func (s *renewedFile[T]) read(r *reading) {
	defer close(r.done)
	err := async.Guard(context.Background(), s.log, "the reader of a renewed file", func() error {
		return s.readFile(r.force)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem, s.reading = err, nil
	s.slow = err != nil && time.Since(r.began) > s.limit/4
}

func (s *renewedFile[T]) readFile(force bool) error {
	s.mu.Lock()
	known := s.file
	s.mu.Unlock()
	info, err := os.Stat(s.path)
	if err == nil && !force && known != nil && os.SameFile(info, known) &&
		info.ModTime().Equal(known.ModTime()) && info.Size() == known.Size() {
		return nil
	}
	content, info, err := readRenewed(s.path, s.limit)
	if err != nil {
		return err
	}
	value, err := s.parse(content)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value, s.file = value, info
	return nil
}

// lastError returns the error of the last reading, or of one that takes too long. The caller holds
// mu.
func (s *renewedFile[T]) lastError() error {
	if s.reading != nil && time.Since(s.reading.began) >= s.limit {
		return fmt.Errorf("not read within %s; check whether its mount hangs", s.limit)
	}
	return s.problem
}

func (s *renewedFile[T]) fault() error {
	s.mu.Lock()
	err := s.lastError()
	s.mu.Unlock()
	if err != nil {
		// Read the file again, so that a later call of fault sees a repair even if nobody needs the
		// token.
		_, _ = s.begin(false)
	}
	return err
}

// readRenewed reads the file. If the system allows it, it gives up on a path that blocks, such as a
// FIFO.
func readRenewed(path string, limit time.Duration) ([]byte, os.FileInfo, error) {
	// With O_NONBLOCK, open does not wait for a FIFO's writer, and reading finds the end.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open: %w", csierr.WithoutPath(err))
	}
	defer func() { _ = f.Close() }()
	// Regular files do not support deadlines, and need none.
	_ = f.SetReadDeadline(time.Now().Add(limit / 2))
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("stat: %w", csierr.WithoutPath(err))
	}
	const most = 1 << 20
	content, err := io.ReadAll(io.LimitReader(f, most))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, errors.New("read: timed out; it is a pipe, and has to be a file")
	case err != nil:
		return nil, nil, fmt.Errorf("read: %w", csierr.WithoutPath(err))
	}
	return content, info, nil
}
