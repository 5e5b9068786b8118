package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// AgentClient calls the agent of one instance.
type AgentClient struct {
	// Name is the instance's name in errors.
	Name string
	// Observe, if it is not nil, is called at the end of every call of the driver's node service.
	Observe func(method string, request any, began time.Time, err error)

	config Config
	open   func(context.Context) (*link, error)

	mu sync.Mutex
	// mu guards the fields below.
	link *link
	dir  string
}

// link is a connection to an agent.
type link struct {
	client  *grpc.ClientConn
	streams *streams
	// close ends the agent in order, and kill ends it at once. Both wait for its end.
	close func() error
	kill  func()
	// why returns what is known about the end of an agent that does not answer.
	why func() string
}

// newLink returns a connection over streams, without the functions that end the agent.
func newLink(s *streams) (*link, error) {
	client, err := grpc.NewClient("passthrough:agent", grpc.WithIdleTimeout(0),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return s.Accept() }))
	return &link{client: client, streams: s}, err
}

// connect connects to the agent and starts the driver.
func (g *AgentClient) connect(ctx context.Context) error {
	l, err := g.open(ctx)
	if err != nil {
		return fmt.Errorf("start an agent in %s: %w", g.Name, err)
	}
	g.mu.Lock()
	g.link = l
	g.mu.Unlock()
	dir, err := do[Config, string](ctx, g, "Start", g.config)
	if err != nil {
		return errors.Join(err, l.close())
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dir = dir
	return nil
}

// Reconnect starts a new agent after the instance was stopped and started. It ends the old agent
// first.
func (g *AgentClient) Reconnect(ctx context.Context) error {
	g.Kill()
	return g.connect(ctx)
}

// current returns the connection to the present agent.
func (g *AgentClient) current() *link {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.link
}

// Kill ends the agent and all that it started at once, as the loss of its instance does.
func (g *AgentClient) Kill() {
	l := g.current()
	_ = l.client.Close()
	l.kill()
}

// Close ends the agent and all that it started. It returns an error if volumes were still
// mounted.
func (g *AgentClient) Close() error {
	l := g.current()
	_ = l.client.Close()
	if err := l.close(); err != nil {
		return fmt.Errorf("end the agent in %s: %w", g.Name, err)
	}
	return nil
}

// do makes a call of the agent.
func do[In, Out any](ctx context.Context, g *AgentClient, method string, args In) (
	out Out, err error) {
	text, err := json.Marshal(args)
	if err != nil {
		return out, err
	}
	l := g.current()
	var answer []byte
	err = l.client.Invoke(ctx, agentService+method, text, &answer, grpc.ForceCodec(rawCodec{}))
	switch {
	case err == nil:
		err = json.Unmarshal(answer, &out)
	case ctx.Err() != nil:
		err = ctx.Err()
	case l.streams.isClosed():
		err = l.lost(err)
	default:
		err = errors.New(status.Convert(err).Message())
	}
	if err != nil {
		return out, fmt.Errorf("in %s: %w", g.Name, err)
	}
	return out, nil
}

// lost describes a call whose agent has gone.
func (l *link) lost(err error) error {
	return fmt.Errorf("the agent does not answer: %s%s", status.Convert(err).Message(), l.why())
}

// Invoke calls the driver's node service in the instance, so that an AgentClient is a connection for
// the generated CSI clients.
func (g *AgentClient) Invoke(ctx context.Context, method string, args, reply any,
	options ...grpc.CallOption) error {
	began, l := time.Now(), g.current()
	err := l.client.Invoke(ctx, method, args, reply, options...)
	if err != nil && ctx.Err() == nil && l.streams.isClosed() {
		// The error is not the driver's, and a repeated call would not help.
		err = status.Errorf(codes.Internal, "in %s: %s: %s", g.Name, method, l.lost(err))
	}
	if g.Observe != nil {
		g.Observe(method, args, began, err)
	}
	return err
}

// NewStream fails, because the node service has no streams.
func (g *AgentClient) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (
	grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "an agent has no streams")
}

// Path returns a path below the agent's directory, for volumes.
func (g *AgentClient) Path(elements ...string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return filepath.Join(append([]string{g.dir}, elements...)...)
}

// Facts returns the facts of the instance.
func (g *AgentClient) Facts(ctx context.Context) (Facts, error) {
	return do[Nothing, Facts](ctx, g, "Facts", Nothing{})
}

// MakeDirs makes directories.
func (g *AgentClient) MakeDirs(ctx context.Context, paths ...string) error {
	_, err := do[[]string, Nothing](ctx, g, "MakeDirs", paths)
	return err
}

// Write writes the blocks of a pattern.
func (g *AgentClient) Write(ctx context.Context, w Writing) error {
	_, err := do[Writing, Nothing](ctx, g, "Write", w)
	return err
}

// Verify reads every block of a pattern from the disk and reports the wrong ones.
func (g *AgentClient) Verify(ctx context.Context, place Place, p Pattern) (Report, error) {
	return do[Reading, Report](ctx, g, "Verify", Reading{place, p})
}

// Records reads the records that a writer has written.
func (g *AgentClient) Records(ctx context.Context, place Place, p Pattern) (Records, error) {
	return do[Reading, Records](ctx, g, "Records", Reading{place, p})
}

// Scan reads a whole device or file from the disk.
func (g *AgentClient) Scan(ctx context.Context, place Place) (Scan, error) {
	return do[Place, Scan](ctx, g, "Scan", place)
}

// Sample reads a part of a device from the disk.
func (g *AgentClient) Sample(ctx context.Context, s Sampling) (Sample, error) {
	return do[Sampling, Sample](ctx, g, "Sample", s)
}

// FilesystemBytes returns the size of the filesystem at a path, as a workload asks for it.
func (g *AgentClient) FilesystemBytes(ctx context.Context, path string) (int64, error) {
	return do[string, int64](ctx, g, "FilesystemBytes", path)
}

// StartWriter starts a writer and returns its number.
func (g *AgentClient) StartWriter(ctx context.Context, r Recording) (int, error) {
	return do[Recording, int](ctx, g, "StartWriter", r)
}

// Acknowledged returns the number of a writer's records that fsync has acknowledged so far.
func (g *AgentClient) Acknowledged(ctx context.Context, writer int) (int64, error) {
	return do[int, int64](ctx, g, "Acknowledged", writer)
}

// StopWriter stops a writer and returns its result.
func (g *AgentClient) StopWriter(ctx context.Context, writer int) (WriterEnd, error) {
	return do[int, WriterEnd](ctx, g, "StopWriter", writer)
}
