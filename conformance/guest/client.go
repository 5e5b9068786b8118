package guest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Verb is the argument that starts a program as an agent. The program must then call Main.
const Verb = "agent"

const endTimeout = 30 * time.Second

// Here runs an agent in this process, which must be in a mount namespace of its own.
func Here(ctx context.Context, c Config) (*AgentClient, error) {
	g := &AgentClient{Name: "this instance", config: c, open: here}
	return g, g.connect(ctx)
}

func here(context.Context) (*link, error) {
	agent, err := newAgent()
	if err != nil {
		return nil, err
	}
	near, far := net.Pipe()
	ended := make(chan error, 1)
	go func() {
		agent.serve(context.Background(), newStreams(far, far, far))
		ended <- agent.Close()
	}()
	l, err := newLink(newStreams(near, near, near))
	l.why = func() string { return "" }
	l.close = sync.OnceValue(func() error { return errors.Join(near.Close(), <-ended) })
	l.kill = func() { _ = l.close() }
	return l, err
}

// Connect copies this program into another instance and starts it there as an agent. The command,
// such as "ssh b", must run its last argument there as a shell script, with root's rights.
func Connect(ctx context.Context, command []string, c Config) (*AgentClient, error) {
	g := &AgentClient{Name: "another instance", config: c}
	if len(command) == 0 {
		return nil, errors.New("expected a command such as ssh b, found none")
	}
	g.open = func(ctx context.Context) (*link, error) { return start(ctx, command) }
	return g, g.connect(ctx)
}

// copyScript saves its input as a program in a new directory, and prints the directory. If it
// fails, it removes both.
const copyScript = `set -e; umask 077; ` +
	`d=$(mktemp -d "${TMPDIR:-/tmp}/` + dirPrefix + `XXXXXXXX"); ` +
	`trap '` + removeScript + `' EXIT; trap 'exit 1' HUP INT PIPE TERM; ` +
	`echo ` + copyMark + ` >"$d/` + markFile + `"; ` +
	`cat >"$d/agent"; chmod 700 "$d/agent"; echo "` + copied + `$d"; trap - EXIT`

// removeScript removes what copyScript has made in $d, and then $d if it is empty.
const removeScript = `rm -f "$d/agent" "$d/` + markFile + `"; [ ! -d "$d" ] || rmdir "$d"`

const copyMark = "copy"

const copied = "oxide-guest copied to "

// copiedTo matches the directory that copyScript prints. The path needs no quotes in a shell.
var copiedTo = regexp.MustCompile(`(?m)^` + copied + `(/[A-Za-z0-9._/-]*` + dirPrefix +
	`[A-Za-z0-9]{8})$`)

func start(ctx context.Context, command []string) (*link, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("read this program: %w", err)
	}
	defer self.Close()
	cmd := Shell(ctx, command, copyScript)
	cmd.Stdin = self
	var said, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &problem
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endTimeout
	err = cmd.Run()
	match := copiedTo.FindStringSubmatch(said.String())
	switch {
	case err != nil && match != nil:
		// The program was copied before the connection failed, so remove the copy.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		err = errors.Join(err, Shell(clean, command, "d="+match[1]+"; "+removeScript).Run())
		return nil, fmt.Errorf("copy this program: %w", err)
	case err != nil:
		return nil, fmt.Errorf("copy this program: %w: %s", err, strings.TrimSpace(problem.String()))
	case match == nil:
		return nil, fmt.Errorf("copy this program: expected the name of a directory, found %.200q",
			said.String())
	}
	return startCopy(ctx, command, match[1])
}

// Shell appends a script to the command, and removes OXIDE_TOKEN from the environment.
func Shell(ctx context.Context, command []string, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, command[0], append(command[1:len(command):len(command)],
		script)...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "OXIDE_TOKEN=")
	})
	return cmd
}

// startCopy starts the copied program. If the program does not remove its own file, the shell does.
func startCopy(ctx context.Context, command []string, dir string) (*link, error) {
	script := fmt.Sprintf("d=%s; $d/agent %s; code=$?; %s; exit $code", dir, Verb, removeScript)
	// The command ends when its standard input ends, not when ctx does.
	cmd := Shell(context.WithoutCancel(ctx), command, script)
	problem := &tail{}
	cmd.Stderr = problem
	// With Setpgid, an interrupt from the terminal does not reach the command.
	cmd.SysProcAttr, cmd.WaitDelay = &syscall.SysProcAttr{Setpgid: true}, time.Second
	stdin, errIn := cmd.StdinPipe()
	stdout, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut, cmd.Start()); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	lines := bufio.NewReader(stdout)
	greeted := make(chan error, 1)
	go func() { greeted <- awaitGreeting(lines) }()
	var err error
	select {
	case err = <-greeted:
	case <-ctx.Done():
		err = ctx.Err()
	}
	go func() { ended <- cmd.Wait() }()
	l, errLink := newLink(newStreams(lines, stdin, stdin))
	l.why = problem.say
	killGroup := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	l.close = sync.OnceValue(func() error {
		_ = stdin.Close()
		select {
		case err := <-ended:
			return err
		case <-time.After(endTimeout):
			killGroup()
			return errors.Join(fmt.Errorf("the agent did not end in %s", endTimeout), <-ended)
		}
	})
	l.kill = sync.OnceFunc(func() {
		killGroup()
		_ = l.close()
	})
	if err = errors.Join(err, errLink); err != nil {
		return nil, errors.Join(fmt.Errorf("%w%s", err, problem.say()), l.close())
	}
	return l, nil
}

// awaitGreeting skips lines that a shell prints before the agent's greeting.
func awaitGreeting(lines *bufio.Reader) error {
	for range 100 {
		line, err := lines.ReadString('\n')
		if strings.TrimSpace(line) == greeting {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the agent did not begin: %w", err)
		}
	}
	return fmt.Errorf("expected the line %q within the first 100, found none", greeting)
}

type tail struct {
	mu sync.Mutex
	// mu guards text.
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-4096):]
	return len(p), nil
}

func (t *tail) say() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if text := strings.TrimSpace(string(t.text)); text != "" {
		return "; it printed: " + text
	}
	return ""
}

// AgentClient calls the agent of one instance.
type AgentClient struct {
	// Name is the instance's name in errors.
	Name string
	// Observe, if it is not nil, is called at the end of every call of the driver's node service.
	Observe func(method string, request any, began time.Time, err error)

	config Config
	open   func(context.Context) (*link, error)
	link   atomic.Pointer[link]
}

type link struct {
	dir     string
	client  *grpc.ClientConn
	streams *streams
	// close() lets the agent clean up; kill() need not. Both wait until the agent has ended.
	close func() error
	kill  func()
	// why() returns the agent's last output for the end of an error message.
	why func() string
}

func newLink(s *streams) (*link, error) {
	client, err := grpc.NewClient("passthrough:agent", grpc.WithIdleTimeout(0),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return s.Accept() }))
	return &link{client: client, streams: s}, err
}

// end ends the agent, and then closes the gRPC client. In the other order the client could wait
// forever: it waits for the streams, which do not end by themselves if the instance is down.
func (l *link) end() error {
	err := l.close()
	_ = l.client.Close()
	return err
}

func (g *AgentClient) connect(ctx context.Context) error {
	l, err := g.open(ctx)
	if err != nil {
		return fmt.Errorf("start an agent in %s: %w", g.Name, err)
	}
	g.link.Store(l)
	if l.dir, err = startAgent(ctx, g, g.config); err != nil {
		return errors.Join(err, l.end())
	}
	return nil
}

// Reconnect replaces the agent after the instance was started again.
func (g *AgentClient) Reconnect(ctx context.Context) error {
	g.Kill()
	return g.connect(ctx)
}

// Kill ends the agent and its processes at once, as the loss of the instance does.
func (g *AgentClient) Kill() {
	l := g.link.Load()
	l.kill()
	_ = l.client.Close()
}

// Close ends the agent. It returns an error if volumes were still mounted.
func (g *AgentClient) Close() error {
	return harness.Wrap(g.link.Load().end(), "end the agent in %s", g.Name)
}

func (g *AgentClient) call(ctx context.Context, method string, args, reply any) error {
	l := g.link.Load()
	err := l.client.Invoke(ctx, method, args, reply, grpc.ForceCodec(codec{}))
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case l.streams.open.Err() != nil:
		return l.lost(err)
	}
	return errors.New(status.Convert(err).Message())
}

func (l *link) lost(err error) error {
	return fmt.Errorf("the agent does not answer: %s%s", status.Convert(err).Message(), l.why())
}

// Invoke calls the instance's node service, so that CSI clients can use g as their connection.
func (g *AgentClient) Invoke(ctx context.Context, method string, args, reply any,
	options ...grpc.CallOption) error {
	began, l := time.Now(), g.link.Load()
	err := l.client.Invoke(ctx, method, args, reply, options...)
	if err != nil && ctx.Err() == nil && l.streams.open.Err() != nil {
		// The agent has ended, so Internal tells the caller not to repeat the call.
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

// Path returns a path below the agent's directory.
func (g *AgentClient) Path(elements ...string) string {
	return filepath.Join(append([]string{g.link.Load().dir}, elements...)...)
}
