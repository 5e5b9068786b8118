package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/rpc"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// AgentClient calls the agent of one instance.
type AgentClient struct {
	// Name is the instance's name in errors.
	Name string
	// Observe, if it is not nil, is called at the end of every call of the driver's node service.
	Observe func(method string, request any, began time.Time, err error)

	config Config
	open   func(context.Context) (*link, error)
	calls  atomic.Uint64

	mu sync.Mutex
	// mu guards the fields below.
	link *link
	dir  string
}

// link is a connection to an agent.
type link struct {
	client *rpc.Client
	// close ends the agent in order, and kill ends it at once. Both wait for its end.
	close func() error
	kill  func()
	// why returns what is known about the end of an agent that does not answer.
	why func() string
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

// Kill ends the agent and all that it started at once, as the loss of its instance does.
func (g *AgentClient) Kill() {
	g.mu.Lock()
	l := g.link
	g.mu.Unlock()
	_ = l.client.Close()
	l.kill()
}

// Close ends the agent and all that it started. It returns an error if volumes were still
// mounted.
func (g *AgentClient) Close() error {
	g.mu.Lock()
	l := g.link
	g.mu.Unlock()
	if err := l.close(); err != nil {
		return fmt.Errorf("end the agent in %s: %w", g.Name, err)
	}
	return nil
}

// cancelTimeout limits how long a canceled call takes to end.
const cancelTimeout = 10 * time.Second

// do makes a call of the agent. A call whose context ends is canceled there.
func do[In, Out any](ctx context.Context, g *AgentClient, method string, args In) (
	out Out, err error) {
	text, err := json.Marshal(args)
	if err != nil {
		return out, err
	}
	c := Call{ID: g.calls.Add(1), Method: method, Args: text}
	if deadline, ok := ctx.Deadline(); ok {
		c.Timeout = max(time.Until(deadline), 1)
	}
	g.mu.Lock()
	l := g.link
	g.mu.Unlock()
	var answer []byte
	pending := l.client.Go("Agent.Do", c, &answer, make(chan *rpc.Call, 1))
	select {
	case <-pending.Done:
	case <-ctx.Done():
		l.client.Go("Agent.Cancel", c.ID, &Nothing{}, make(chan *rpc.Call, 1))
		// The next call must not meet a canceled call that still runs.
		select {
		case <-pending.Done:
		case <-time.After(cancelTimeout):
			return out, fmt.Errorf("in %s: %w", g.Name, ctx.Err())
		}
	}
	err = pending.Error
	if served := rpc.ServerError(""); err != nil && !errors.As(err, &served) {
		err = fmt.Errorf("the agent does not answer: %w%s", err, l.why())
	}
	if err == nil {
		err = json.Unmarshal(answer, &out)
	}
	if err != nil {
		return out, fmt.Errorf("in %s: %w", g.Name, err)
	}
	return out, nil
}

// Conn returns a connection to the driver's node service in the instance.
func (g *AgentClient) Conn() grpc.ClientConnInterface { return conn{g} }

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
