package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// greeting is the first line of an agent. A shell may print lines before it, which are skipped.
const greeting = "oxide-guest agent 2"

// Serve runs an agent until stdin ends. An AgentClient at the other end of stdin and stdout calls
// it. Serve starts the program again with the same arguments, in a mount namespace of its own, and
// the program must call Serve both times. It removes the copy of the program that Connect made.
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
	if _, err = fmt.Fprintln(stdout, greeting); err == nil {
		agent.serve(ctx, newStreams(stdin, stdout, io.NopCloser(nil)))
	}
	return errors.Join(err, agent.Close())
}

// agentService begins the names of the gRPC methods that are the agent's own. Each is a method of
// Agent, with its argument and its result in JSON.
const agentService = "/oxide.Agent/"

// serve answers calls until the connection ends. Then it waits for the calls in progress, which are
// canceled.
func (a *Agent) serve(ctx context.Context, conn *streams) {
	server := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.WaitForHandlers(true),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			calling, cancel := context.WithCancel(stream.Context())
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			method, _ := grpc.MethodFromServerStream(stream) // every stream of a server has one
			var message []byte
			if err := stream.RecvMsg(&message); err != nil {
				return err
			}
			answer, err := a.call(calling, method, message)
			if err != nil {
				return err
			}
			return stream.SendMsg(answer)
		}))
	_ = server.Serve(conn) // returns the end of the connection
	server.Stop()
}

// call calls a method of the agent, or passes the call to the driver's node service.
func (a *Agent) call(ctx context.Context, name string, message []byte) (answer []byte, err error) {
	own, is := strings.CutPrefix(name, agentService)
	if !is {
		// An agent's call that was canceled may still use the volume of this call.
		a.calls.Lock()
		defer a.calls.Unlock()
		if a.plugin == nil {
			return nil, errors.New("no driver runs in this instance: Config.Plugin was empty")
		}
		err = a.plugin.Conn.Invoke(ctx, name, message, &answer, grpc.ForceCodec(rawCodec{}))
		return answer, err
	}
	a.calls.RLock()
	defer a.calls.RUnlock()
	method := reflect.ValueOf(a).MethodByName(own)
	if !method.IsValid() {
		return nil, fmt.Errorf("this agent has no call %s: is it of another release?", own)
	}
	args := reflect.New(method.Type().In(1))
	if err := json.Unmarshal(message, args.Interface()); err != nil {
		return nil, err
	}
	results := method.Call([]reflect.Value{reflect.ValueOf(ctx), args.Elem()})
	if err, _ := results[1].Interface().(error); err != nil {
		return nil, err
	}
	return json.Marshal(results[0].Interface())
}

// rawCodec passes on messages that are bytes already.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

// streams is a connection that consists of two streams. It is also the listener that accepts this
// one connection.
type streams struct {
	net.Conn // has the methods that streams lack, such as SetDeadline, which have no effect
	in       io.Reader
	out      io.Writer
	end      func() error
	closed   chan struct{}
	accept   sync.Once
}

func newStreams(in io.Reader, out io.Writer, end io.Closer) *streams {
	pipe, _ := net.Pipe()
	s := &streams{Conn: pipe, in: in, out: out, closed: make(chan struct{})}
	s.end = sync.OnceValue(func() error {
		close(s.closed)
		return end.Close()
	})
	return s
}

func (s *streams) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *streams) Write(p []byte) (int, error) { return s.out.Write(p) }
func (s *streams) Close() error                { return s.end() }
func (s *streams) Addr() net.Addr              { return s.LocalAddr() }

// Accept returns the connection once. A second call waits until the connection is closed.
func (s *streams) Accept() (conn net.Conn, err error) {
	s.accept.Do(func() { conn = s })
	if conn == nil {
		<-s.closed
		return nil, io.EOF
	}
	return conn, nil
}

func (s *streams) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}
