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
	// Limit is how long a caller waits for the file; 0 means tokenFileLimit.
	Limit time.Duration

	mu sync.Mutex
	// guarded by mu
	token string
	// guarded by mu: the file that held token
	file os.FileInfo
	// guarded by mu: the error of the last reading
	problem error
	// guarded by mu: whether the last reading was slow and failed
	slow bool
	// guarded by mu: the reading in progress
	reading *tokenReading
}

// tokenFileLimit is how long a file may keep its readers waiting.
const tokenFileLimit = 3 * time.Second

// tokenReading is one reading of the file.
type tokenReading struct {
	force bool // reads the file even if it is unchanged
	began time.Time
	done  chan struct{} // closed at the end
}

// current returns the token to send. It reads the file again if the file has changed; if that fails
// it returns the token read last.
func (s *TokenSource) current(ctx context.Context) (string, error) { return s.get(ctx, false) }

// refresh reads the file again after the rack refused the token, because a new token may leave the
// file's times unchanged.
func (s *TokenSource) refresh(ctx context.Context) (string, error) { return s.get(ctx, true) }

// get waits for a reading, but no longer than the limit: on a mount that hangs not even stat
// returns, and no call may hang with it.
func (s *TokenSource) get(ctx context.Context, force bool) (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	asked := time.Now()
	for {
		r, wait := s.begin(force)
		if !wait || !s.await(ctx, r) || !force || r.force && !r.began.Before(asked) {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.token == "" {
		return "", cmp.Or(s.lastError(), ctx.Err())
	}
	return s.token, nil
}

// begin begins a reading, or joins the one in progress: a file that blocks has one reader, since a
// system call on a mount that hangs cannot be canceled. wait reports whether to wait for it: after
// a slow and failed reading, only a caller without another token waits.
func (s *TokenSource) begin(force bool) (r *tokenReading, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reading == nil {
		r := &tokenReading{force: force, began: time.Now(), done: make(chan struct{})}
		s.reading = r
		async.Detach(func() { s.read(r) })
	}
	return s.reading, force || s.token == "" || !s.slow
}

// await reports whether a reading ended within the limit.
func (s *TokenSource) await(ctx context.Context, r *tokenReading) bool {
	limit := time.NewTimer(time.Until(r.began.Add(s.limit())))
	defer limit.Stop()
	select {
	case <-r.done:
		return true
	case <-limit.C:
	case <-ctx.Done():
	}
	return false
}

func (s *TokenSource) limit() time.Duration { return cmp.Or(s.Limit, tokenFileLimit) }

func (s *TokenSource) read(r *tokenReading) {
	defer close(r.done)
	err := async.Guard(context.Background(), s.Log, "the reader of the token file", func() error {
		return s.readFile(r.force)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem, s.reading = err, nil
	s.slow = err != nil && time.Since(r.began) > s.limit()/4
}

func (s *TokenSource) readFile(force bool) error {
	info, err := os.Stat(s.Path)
	if err == nil && !force && s.knows(info) {
		return nil
	}
	token, info, err := readToken(s.Path, s.limit())
	if err != nil {
		return err
	}
	if s.OnToken != nil {
		s.OnToken(token)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token, s.file = token, info
	return nil
}

func (s *TokenSource) knows(info os.FileInfo) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file != nil && sameFile(info, s.file)
}

// lastError returns the error of the last reading, or of one that takes too long. The caller holds
// mu.
func (s *TokenSource) lastError() error {
	if s.reading != nil && time.Since(s.reading.began) >= s.limit() {
		return fmt.Errorf("not read within %s; check whether its mount hangs",
			s.limit())
	}
	return s.problem
}

// Fault returns what a person has to repair about the file, or nil. Calls continue with the token
// read last.
func (s *TokenSource) Fault() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	err := s.lastError()
	s.mu.Unlock()
	if err == nil {
		return nil
	}
	// Read the file again, so that the next caller learns of a repair even if no call needs the token.
	_, _ = s.begin(false)
	return csierr.New(csierr.TokenFileUnreadable, "OXIDE_TOKEN_FILE (--token-file): %s; the token "+
		"last read is in use until the rack refuses it", err)
}

// readToken reads the file. It gives up on a path that blocks, such as a FIFO, where the system
// allows it.
func readToken(path string, limit time.Duration) (string, os.FileInfo, error) {
	// With O_NONBLOCK, open does not wait for a FIFO's writer, and reading finds the end.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", nil, fmt.Errorf("open: %w", csierr.WithoutPath(err))
	}
	defer func() { _ = f.Close() }()
	// Regular files do not support deadlines, and need none.
	_ = f.SetReadDeadline(time.Now().Add(limit / 2))
	info, err := f.Stat()
	if err != nil {
		return "", nil, fmt.Errorf("stat: %w", csierr.WithoutPath(err))
	}
	const most = 64 << 10
	content, err := io.ReadAll(io.LimitReader(f, most))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "", nil, errors.New("read: timed out; it is a pipe, and has to be a file")
	case err != nil:
		return "", nil, fmt.Errorf("read: %w", csierr.WithoutPath(err))
	}
	token := string(bytes.TrimSpace(content))
	return token, info, CheckToken(token)
}

func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
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
