package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// greeting is the first line of an agent. A shell may print lines before it, which are skipped.
const greeting = "oxide-guest agent 1"

// Serve runs an agent for the Guest at the other end of stdin and stdout, until stdin ends. It
// starts the program again with the same arguments, in a mount namespace of its own; the program
// must call Serve both times. It removes the copy of the program that Connect made.
func Serve(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	if !namespace.Entered() {
		if err := removeCopy(); err != nil {
			return err
		}
	}
	if err := namespace.Enter(); err != nil {
		return err
	}
	return serve(ctx, stdin, stdout)
}

// Main calls Serve in a program that was started with [Verb]. It serves the standard streams,
// prints an error, and returns the exit status.
func Main(ctx context.Context) int {
	if err := Serve(ctx, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		return 1
	}
	return 0
}

// removeCopy removes this program's file if Connect copied it here. The running program does not
// need its file.
func removeCopy() error {
	path, err := os.Executable()
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if !strings.HasPrefix(filepath.Base(dir), dirPrefix) {
		return nil
	}
	if err := RemoveOwn(dir, copyMark); !errors.Is(err, ErrNotOwn) {
		return err
	}
	return nil // a person has put the program there
}

func serve(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	agent, err := newAgent()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(stdout, greeting); err != nil {
		return errors.Join(err, agent.Close())
	}
	return errors.Join(agent.serve(ctx, stdin, stdout), agent.Close())
}

// serve answers calls until stdin ends. Then it ends the calls in progress.
func (a *Agent) serve(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := rpc.NewServer()
	if err := server.RegisterName("Agent",
		&service{agent: a, ctx: ctx, cancels: map[uint64]context.CancelFunc{}}); err != nil {
		return err
	}
	server.ServeConn(transport{endReader{stdin, cancel}, stdout, io.NopCloser(nil)})
	return nil
}

// transport is a connection that consists of two streams.
type transport struct {
	io.Reader
	io.Writer
	io.Closer
}

// endReader calls end when the reader ends.
type endReader struct {
	io.Reader
	end func()
}

func (r endReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil {
		r.end()
	}
	return n, err
}

// Call is a call of one of the agent's methods, with its arguments in JSON.
type Call struct {
	ID uint64
	// Timeout is 0 for a call without a deadline.
	Timeout time.Duration
	Method  string
	Args    []byte
}

// service calls the agent's methods as package net/rpc expects.
type service struct {
	agent *Agent
	ctx   context.Context

	mu sync.Mutex
	// mu guards cancels, which end the calls in progress.
	cancels map[uint64]context.CancelFunc
}

// Do makes a call of the agent, which the other end may cancel, and answers in JSON.
func (s *service) Do(c Call, out *[]byte) error {
	ctx, cancel := context.WithCancel(s.ctx)
	if c.Timeout > 0 {
		ctx, cancel = context.WithTimeout(s.ctx, c.Timeout)
	}
	s.mu.Lock()
	s.cancels[c.ID] = cancel
	s.mu.Unlock()
	defer func() {
		cancel()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.cancels, c.ID)
	}()
	method := reflect.ValueOf(s.agent).MethodByName(c.Method)
	if !method.IsValid() {
		return fmt.Errorf("this agent has no call %s: is it of another release?", c.Method)
	}
	args := reflect.New(method.Type().In(1))
	if err := json.Unmarshal(c.Args, args.Interface()); err != nil {
		return err
	}
	results := method.Call([]reflect.Value{reflect.ValueOf(ctx), args.Elem()})
	if err, _ := results[1].Interface().(error); err != nil {
		return err
	}
	text, err := json.Marshal(results[0].Interface())
	*out = text
	return err
}

// Cancel ends a call in progress.
func (s *service) Cancel(id uint64, _ *Nothing) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.cancels[id]; cancel != nil {
		cancel()
	}
	return nil
}
