package rack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

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

// refresh reads the file again after the rack refused the token, because a new token may leave the
// file's times unchanged.
func (s *TokenSource) refresh(ctx context.Context) (string, error) { return s.get(ctx, true) }

func (s *TokenSource) get(ctx context.Context, force bool) (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	return s.renewed().get(ctx, force)
}

// Fault returns what a person has to repair about the file, or nil. Calls continue with the token
// read last.
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
