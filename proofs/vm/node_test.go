//go:build linux

package vm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// bootTime is how long a guest may take until its sshd answers.
const bootTime = 10 * time.Minute

// imageDir returns the directory of the machines' image, or skips the test without one.
func imageDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("OXIDE_VM_IMAGE")
	if dir == "" {
		t.Skip("virtual machines boot in make vm, and need minutes")
	}
	return dir
}

// hostKey returns the file of the key that opens every guest, or skips the test without an image.
func hostKey(t *testing.T) string {
	t.Helper()
	h, err := machine.Open(t.Context(), imageDir(t))
	must(t, err)
	return h.Key()
}

// node is an instance of the rack that runs as a virtual machine, with the driver's node service in
// it. An ssh keeps a connection to it, on which the driver's socket comes out and all commands go.
type node struct {
	harness.Instance
	rack *harness.Rack
	// key is the private key that the guest accepts, and driver the program that is copied there.
	key, driver string
	address     string // of the guest's sshd, since its last boot

	master *exec.Cmd
	hold   io.Closer // its standard input: it ends with that
	conn   *grpc.ClientConn
}

const (
	guestDriver = "/root/oxide-csi-plugin"
	guestSocket = "/run/csi.sock"
)

func (n *node) path(name string) string { return filepath.Join(n.rack.Dir, n.Name+"."+name) }

// ssh returns an ssh that runs a command in the guest, without having started it.
func (n *node) ssh(ctx context.Context, command string, options ...string) *exec.Cmd {
	_, port, _ := net.SplitHostPort(n.address)
	args := append([]string{"-i", n.key, "-p", port, "-S", n.path("ssh"), "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o",
		"LogLevel=error", "-o", "ConnectTimeout=20"}, options...)
	return exec.CommandContext(ctx, "ssh", append(args, "root@127.0.0.1", command)...)
}

// run returns what a command prints in the guest.
func (n *node) run(ctx context.Context, stdin io.Reader, command string) ([]byte, error) {
	c := n.ssh(ctx, command)
	var out, said bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = stdin, &out, &said
	if err := c.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("in instance %s: %s: %w: %s", n.Name, command, err, &said)
	}
	return out.Bytes(), nil
}

// changeImage gives the instance a new root disk, of the image that a directory names.
func (n *node) changeImage(ctx context.Context, dir string) error {
	name, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		return fmt.Errorf("make the image of a newer Debian with make vm-image: %w", err)
	}
	if err := n.rack.StopInstance(ctx, n.ID); err != nil {
		return err
	}
	image, at := filepath.Join(dir, strings.TrimSpace(string(name))), filepath.Join(n.Guest, "machine")
	// The QEMU that has just ended may still have its files open.
	out, err := exec.CommandContext(ctx, "sh", "-ec", `ln -sfn "$1" "$2/image"; rm "$2/root.qcow2"
		qemu-img create -q -f qcow2 -F raw -b "$1/root.img" "$2/root.qcow2"`, "sh", image, at).
		CombinedOutput()
	if err != nil {
		return fmt.Errorf("change the root disk of instance %s: %w: %s", n.Name, err, out)
	}
	return n.rack.StartInstance(ctx, n.ID)
}

// connect waits until the guest has booted, and starts the driver there.
func (n *node) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	defer harness.Catch(&err)
	harness.Must(harness.Await(ctx, bootTime, func() error { return n.reach(ctx) }))
	if _, err := n.run(ctx, nil, "test -x "+guestDriver); err != nil {
		program := harness.Got(os.Open(n.driver))
		defer program.Close()
		harness.Got(n.run(ctx, program, fmt.Sprintf("cat >%s.new && chmod +x %[1]s.new && sync && "+
			"mv %[1]s.new %[1]s && sync", guestDriver)))
	}
	harness.Got(n.run(ctx, nil, fmt.Sprintf("setsid %s --mode=node --endpoint=unix://%s "+
		">>/root/driver.log 2>&1 </dev/null &", guestDriver, guestSocket)))
	n.conn = harness.Got(grpc.NewClient("unix://"+n.path("sock"), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(harness.ErrorRules)))
	return harness.Await(ctx, bootTime, func() error {
		n.conn.ResetConnectBackoff()
		info, err := n.node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		if err == nil && info.GetNodeId() != n.ID {
			err = fmt.Errorf("the driver in %s says that it is in %s", n.ID, info.GetNodeId())
		}
		return err
	})
}

func (n *node) reach(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	n.sever()
	n.address = harness.Got(n.sshd(ctx))
	_ = os.Remove(n.path("ssh"))
	// It outlives this call.
	c := n.ssh(context.WithoutCancel(ctx), "echo up; exec cat >/dev/null", "-M", "-o",
		"StreamLocalBindUnlink=yes", "-L", n.path("sock")+":"+guestSocket)
	out := harness.Got(c.StdoutPipe())
	n.hold = harness.Got(c.StdinPipe())
	harness.Must(c.Start())
	n.master = c
	if _, err := out.Read(make([]byte, 1)); err != nil {
		n.sever()
		return fmt.Errorf("the sshd of instance %s does not answer: %w", n.Name, err)
	}
	return nil
}

// sshd returns the address of the sshd of the instance's machine.
func (n *node) sshd(ctx context.Context) (string, error) {
	state, err := n.rack.Admin.State(ctx)
	for _, m := range state.Machines {
		if m.InstanceID == n.ID {
			return m.SSH, err
		}
	}
	return "", errors.Join(err, errors.New("it has no machine"))
}

// sever ends all connections to the guest, as its end would: calls and commands fail.
func (n *node) sever() {
	if n.conn != nil {
		_ = n.conn.Close()
	}
	if n.master != nil {
		_ = n.master.Process.Kill()
		_ = n.hold.Close()
		_ = n.master.Wait()
		n.master = nil
	}
}

func (n *node) node() csi.NodeClient { return csi.NewNodeClient(n.conn) }

func (n *node) qemu() (*os.Process, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*/cwd")
	for _, dir := range dirs {
		if at, _ := os.Readlink(dir); at == filepath.Join(n.Guest, "machine") {
			pid, err := strconv.Atoi(strings.Split(dir, "/")[2])
			if err != nil {
				return nil, err
			}
			return os.FindProcess(pid)
		}
	}
	return nil, errors.Join(err, fmt.Errorf("instance %s has no QEMU", n.Name))
}

// kill kills the machine, and starts the instance again when the rack has noticed.
func (n *node) kill(ctx context.Context) error {
	process, err := n.qemu()
	if err == nil {
		err = process.Kill()
	}
	n.sever()
	if err != nil {
		return err
	}
	return harness.Await(ctx, patience, func() error {
		state, err := n.rack.Admin.State(ctx)
		if err != nil {
			return err
		}
		for _, i := range state.Instances {
			if i.ID == n.ID && i.RunState == "failed" {
				return n.rack.StartInstance(ctx, n.ID)
			}
		}
		return fmt.Errorf("the machine of instance %s was killed, and the rack has not noticed", n.Name)
	})
}

func (n *node) pause(ctx context.Context, d time.Duration) error {
	process, err := n.qemu()
	if err == nil {
		err = process.Signal(syscall.SIGSTOP)
	}
	if err != nil {
		return err
	}
	after(ctx, d)
	return process.Signal(syscall.SIGCONT)
}

// after waits for a moment that was drawn.
func after(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
