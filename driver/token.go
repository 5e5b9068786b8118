package driver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"
)

// tokenSource is where the rack's token comes from: a fixed one, or a file that somebody renews.
type tokenSource struct {
	Fixed string
	Path  string
	// Hidden learns every token, so that nobody is shown it.
	Hidden *hidden

	mu sync.Mutex
	// guarded by mu
	token string
	file  os.FileInfo
}

// tokensOf is where a configuration has the token.
func tokensOf(c Config, h *hidden) *tokenSource {
	h.add(c.Token)
	return &tokenSource{Fixed: c.Token, Path: c.TokenFile, Hidden: h}
}

// current is the token to send. The file is read again when it is another one than last time; while
// it cannot be read the token last seen serves on.
func (s *tokenSource) current() (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	info, err := os.Stat(s.Path)
	if err == nil && s.file != nil && sameFile(info, s.file) {
		return s.token, nil
	}
	return s.read()
}

// renewed reads the file anew, for a rack that refused the token: the file's times need not tell.
func (s *tokenSource) renewed() (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.read()
}

// read is called with mu held.
func (s *tokenSource) read() (string, error) {
	token, info, err := readToken(s.Path)
	switch {
	case err == nil:
		s.Hidden.add(token)
		s.token, s.file = token, info
	case s.token == "":
		return "", err
	}
	return s.token, nil
}

func readToken(path string) (string, os.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", nil, fmt.Errorf("open: %w", reasonOf(err))
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return "", nil, fmt.Errorf("look at: %w", reasonOf(err))
	}
	const most = 64 << 10
	content, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return "", nil, fmt.Errorf("read: %w", reasonOf(err))
	}
	token := string(bytes.TrimSpace(content))
	return token, info, tokenProblem(token)
}

func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// rackTransport carries the client's requests: it puts the present token in, tries once more with a
// fresh one when the rack refuses it, and counts.
type rackTransport struct {
	Base    http.RoundTripper
	Tokens  *tokenSource
	Metrics *metrics
	// Refused is told when the rack refused the freshest token there is.
	Refused func()
}

// RoundTrip sends one request.
func (t *rackTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := t.Tokens.current()
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	answer, err := t.send(req, token)
	if err != nil || answer.StatusCode != http.StatusUnauthorized {
		return answer, err
	}
	again, fresh := t.secondTry(req, token)
	if again == nil {
		t.refused()
		return answer, nil
	}
	drain(answer.Body)
	if answer, err = t.send(again, fresh); err == nil &&
		answer.StatusCode == http.StatusUnauthorized {
		t.refused()
	}
	return answer, err
}

func (t *rackTransport) send(req *http.Request, token string) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	start := time.Now()
	answer, err := t.Base.RoundTrip(req)
	t.Metrics.request(req.Method, answer, time.Since(start))
	if err != nil {
		return nil, err
	}
	if answer.ContentLength > mostAnswerBytes {
		// Not drained: the connection is given up with it.
		_ = answer.Body.Close()
		return nil, errAnswerTooLarge
	}
	answer.Body = &boundedBody{ReadCloser: answer.Body, left: mostAnswerBytes}
	if falseDelete(req, answer) {
		drain(answer.Body)
		return nil, fmt.Errorf("HTTP %d to a DELETE, which is no answer of a rack's; look at "+
			"OXIDE_HOST and at proxies before it", answer.StatusCode)
	}
	return answer, nil
}

// mostAnswerBytes is more than any answer of a rack has: a page of a thousand disks with long
// descriptions has a few MiB. Whatever else answers must not fill the driver's memory.
const mostAnswerBytes = 32 << 20

var errAnswerTooLarge = fmt.Errorf("the answer has more than %d MiB, which is none of a rack's; "+
	"look at OXIDE_HOST and at proxies before it", mostAnswerBytes>>20)

// boundedBody ends the reading of an answer that turns out too large.
type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errAnswerTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// falseDelete says whether a DELETE got a success that is not the rack's, which has no body to tell
// it by but only its 204. The client takes any 2xx, a proxy's page for one, and a disk that is
// there still would pass for deleted.
func falseDelete(req *http.Request, answer *http.Response) bool {
	return req.Method == http.MethodDelete && answer.StatusCode < http.StatusMultipleChoices &&
		answer.StatusCode != http.StatusNoContent
}

// secondTry is the request once more and a fresher token for it; nil when there is none.
func (t *rackTransport) secondTry(req *http.Request, token string) (*http.Request, string) {
	fresh, err := t.Tokens.renewed()
	if err != nil || fresh == token {
		return nil, ""
	}
	again, err := replay(req)
	if err != nil {
		return nil, ""
	}
	return again, fresh
}

func (t *rackTransport) refused() {
	if t.Refused != nil {
		t.Refused()
	}
}

// replay is the request with its body from the start.
func replay(req *http.Request) (*http.Request, error) {
	again := req.Clone(req.Context())
	if req.Body == nil || req.Body == http.NoBody {
		return again, nil
	}
	if req.GetBody == nil {
		return nil, errors.New("the body cannot be sent twice")
	}
	body, err := req.GetBody()
	again.Body = body
	return again, err
}

// drain lets the connection be used again.
func drain(body io.ReadCloser) {
	_, _ = io.Copy(io.Discard, io.LimitReader(body, 64<<10))
	_ = body.Close()
}
