package keepertest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"

	"k8s.io/client-go/rest"
)

// Client returns the configuration of a client whose User-Agent is the name, and a function that
// cuts it off for good: its connections break, and none of its requests reaches the server any
// more. So a test kills a keeper. A request that has arrived is still applied, as of a keeper that
// dies, perhaps after cut has returned; an interceptor decides that, and sees when it is applied.
func (s *Server) Client(name string) (config *rest.Config, cut func()) {
	l := &line{name: name}
	// A client may have more requests at once than the default keeps connections for.
	l.transport = &http.Transport{DialContext: l.dial, MaxIdleConnsPerHost: 64}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cuts = append(s.cuts, l.cut)
	return &rest.Config{Host: s.http.URL, Transport: l, UserAgent: name, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/json",
			AcceptContentTypes: "application/json"}}, l.cut
}

// line is how a client reaches the server.
type line struct {
	name      string
	transport *http.Transport
	mu        sync.Mutex
	// guarded by mu
	broken error
	open   []net.Conn
}

// RoundTrip sends a request.
func (l *line) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := l.transport.RoundTrip(r)
	if err == nil {
		return response, nil
	}
	// client-go repeats a read that breaks otherwise, after a second.
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		err = l.broken
	}
	return nil, err
}

func (l *line) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		_ = conn.Close()
		return nil, l.broken
	}
	l.open = append(l.open, conn)
	return conn, nil
}

func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.broken = fmt.Errorf("the client %s is cut off", l.name)
	for _, conn := range l.open {
		_ = conn.Close()
	}
	l.open = nil
}
