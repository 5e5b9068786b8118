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

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// TokenSource is where the rack's token comes from: a fixed one, or a file that somebody renews.
type TokenSource struct {
	Fixed string
	Path  string
	// Learned is told every token before it is sent, so that nobody is shown it; may be nil.
	Learned func(token string)
	Log     *slog.Logger
	// Limit is how long a caller waits for the file; 0 means tokenFileLimit.
	Limit time.Duration

	mu sync.Mutex
	// guarded by mu
	token string
	// guarded by mu: the file that held token
	file os.FileInfo
	// guarded by mu: what the last reading lacked, nil for nothing
	problem error
	// guarded by mu: that took long
	slow bool
	// guarded by mu: the reading under way
	reading *tokenReading
}

// tokenFileLimit is how long a file may keep its readers waiting.
const tokenFileLimit = 3 * time.Second

// tokenReading is one look at the file.
type tokenReading struct {
	force bool // reads also the file that was read before
	began time.Time
	done  chan struct{} // closed at the end
}

// current is the token to send. The file is read again when it is another one than last time; while
// it cannot be read the token last seen serves on.
func (s *TokenSource) current(ctx context.Context) (string, error) { return s.ask(ctx, false) }

// renewed reads the file anew, for a rack that refused the token: the file's times need not tell.
func (s *TokenSource) renewed(ctx context.Context) (string, error) { return s.ask(ctx, true) }

// ask waits for a reading, but no longer than the limit: on a mount that hangs, even a look at the
// file's times does not come back, and no call may hang with it.
func (s *TokenSource) ask(ctx context.Context, force bool) (string, error) {
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
		return "", cmp.Or(s.trouble(), ctx.Err())
	}
	return s.token, nil
}

// begin begins a reading, or joins the one under way: a file that blocks has one reader, for as
// long as it takes. Nobody can end a system call on a mount that hangs. wait says whether to wait
// for it: when the one before was slow and failed, only who has no other token does.
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

// await says whether a reading has ended before the time for it was up.
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
	if s.Learned != nil {
		s.Learned(token)
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

// trouble is called with mu held.
func (s *TokenSource) trouble() error {
	if s.reading != nil && time.Since(s.reading.began) >= s.limit() {
		return fmt.Errorf("reading it has not ended within %s; look whether its mount hangs",
			s.limit())
	}
	return s.problem
}

// Fault is what a person has to mend about the file, or nil. Calls go on with the token last seen.
func (s *TokenSource) Fault() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	err := s.trouble()
	s.mu.Unlock()
	if err == nil {
		return nil
	}
	// Whoever asks again finds out whether it is mended, also when no call needs the token.
	_, _ = s.begin(false)
	return csierr.New(csierr.TokenFileUnreadable, "OXIDE_TOKEN_FILE "+
		"(--token-file): %s; the token last read is in use until the rack refuses it", err)
}

// readToken reads a file that need not be one: what keeps it waiting is given up, as far as the
// system lets it.
func readToken(path string, limit time.Duration) (string, os.FileInfo, error) {
	// With O_NONBLOCK a FIFO that nobody writes to is opened at once, and has an end.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", nil, fmt.Errorf("open: %w", csierr.WithoutPath(err))
	}
	defer func() { _ = f.Close() }()
	// Files have no deadline, and need none.
	_ = f.SetReadDeadline(time.Now().Add(limit / 2))
	info, err := f.Stat()
	if err != nil {
		return "", nil, fmt.Errorf("look at: %w", csierr.WithoutPath(err))
	}
	const most = 64 << 10
	content, err := io.ReadAll(io.LimitReader(f, most))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "", nil, errors.New("read: nothing came; it has to be a file, and is a pipe")
	case err != nil:
		return "", nil, fmt.Errorf("read: %w", csierr.WithoutPath(err))
	}
	token := string(bytes.TrimSpace(content))
	return token, info, CheckToken(token)
}

func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// CheckToken is why a token cannot be sent at all. Whether the rack likes it is seen later.
func CheckToken(token string) error {
	const most = 4096
	noWord := func(r rune) bool { return r <= ' ' || r > '~' }
	switch {
	case token == "":
		return errors.New("holds no token")
	case len(token) > most || strings.ContainsFunc(token, noWord):
		return errors.New("holds something that is no token: a token is one word of ASCII " +
			"characters")
	}
	return nil
}
