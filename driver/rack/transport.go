package rack

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Transport carries the client's requests: it puts the present token in, tries once more with a
// fresh one when the rack refuses it, and counts.
type Transport struct {
	Base   http.RoundTripper
	Tokens *TokenSource
	// Observe is told of every request and its answer, nil when there was none.
	Observe func(method string, answer *http.Response, took time.Duration)
	// Refused is told when the rack refused the freshest token there is.
	Refused func()
}

// RoundTrip sends one request.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := t.Tokens.current(req.Context())
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

func (t *Transport) send(req *http.Request, token string) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+token)
	start := time.Now()
	answer, err := t.Base.RoundTrip(req)
	if t.Observe != nil {
		t.Observe(req.Method, answer, time.Since(start))
	}
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

// Read reads up to the bound, and is an error behind it.
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
func (t *Transport) secondTry(req *http.Request, token string) (*http.Request, string) {
	fresh, err := t.Tokens.renewed(req.Context())
	if err != nil || fresh == token {
		return nil, ""
	}
	again, err := replay(req)
	if err != nil {
		return nil, ""
	}
	return again, fresh
}

func (t *Transport) refused() {
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
