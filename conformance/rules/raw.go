package rules

import (
	"fmt"
	"io"
	"net/http"
	"strings"
)

// Plain is a request that Oxide's client cannot send, or whose answer it hides.
type Plain struct {
	Method string
	// Path is the encoded path and query, beginning with the slash.
	Path string
	Body string
	// Header is added to the headers of every request of the client: the bearer, the content type
	// and the version of the API. An empty header here removes one of those.
	Header map[string]string
}

// Send sends a plain request. It ends the check if there is no answer.
func (c *Check) Send(p Plain) Answer {
	return Must[Answer](c, p.Method+" "+p.Path)(c.send(p))
}

func (c *Check) send(p Plain) (Answer, error) {
	req, err := http.NewRequestWithContext(c.ctx, p.Method,
		strings.TrimSuffix(c.Client.Host(), "/")+"/", strings.NewReader(p.Body))
	if err != nil {
		return Answer{}, fmt.Errorf("make the request: %w", err)
	}
	// The path is sent unchanged, although a client would normalize it.
	route, query, _ := strings.Cut(p.Path, "?")
	req.URL.Opaque = route
	req.URL.RawQuery = query
	header := map[string]string{"Authorization": "Bearer " + c.Token,
		"Content-Type": "application/json", "Api-Version": APIVersion}
	for name, value := range p.Header {
		header[name] = value
	}
	for name, value := range header {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return Answer{}, fmt.Errorf("expected an answer; found %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("read the answer: %w", err)
	}
	return Answer{resp.StatusCode, resp.Header, body}, nil
}

// APIVersion is the API version that the pinned client requests.
const APIVersion = "2026060800.0.0"
