package keepertest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"

	"k8s.io/client-go/rest"
)

// Client returns the configuration of a client with the name as its User-Agent, and a function that
// disconnects it for good: its connections break, and none of its requests reaches the server any
// more. With it a test kills a keeper. A request that has already arrived is still applied, perhaps
// after cut has returned, as with a keeper that dies. An interceptor can prevent that, and sees
// when the request is applied.
func (s *Server) Client(name string) (config *rest.Config, cut func()) {
	l := &line{name: name}
	// The default keeps fewer idle connections than a client may have requests at once.
	l.transport = &http.Transport{DialContext: l.dial, MaxIdleConnsPerHost: 64}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cuts = append(s.cuts, l.cut)
	return &rest.Config{Host: s.http.URL, Transport: l, UserAgent: name, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/json",
			AcceptContentTypes: "application/json"}}, l.cut
}

// line is a client's connection to the server.
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
	// Return the error at once: client-go would repeat a broken read after a second.
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
