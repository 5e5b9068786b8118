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

// imageDir returns the directory of the machines' image. Without an image it skips the test.
func imageDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("OXIDE_VM_IMAGE")
	if dir == "" {
		t.Skip("virtual machines boot in make vm, and need minutes")
	}
	return dir
}

// hostKey returns the file of the ssh key for every guest, or skips the test without an image.
func hostKey(t *testing.T) string {
	t.Helper()
	return harness.Need(machine.Open(t.Context(), imageDir(t)))(t).Key()
}

// node is an instance that runs as a virtual machine, with the driver's node service in it. An ssh
// process keeps one connection to it, which forwards the driver's socket and carries all commands.
type node struct {
	harness.Instance
	rack *harness.Rack
	// key is the private key that the guest accepts. driver is the program that connect copies to it.
	key, driver string
	address     string // of the guest's sshd, since its last boot

	master *exec.Cmd
	hold   io.Closer // master's standard input; closing it ends master
	conn   *grpc.ClientConn
}

const (
	guestDriver = "/root/oxide-csi-plugin"
	guestSocket = "/run/csi.sock"
)

func (n *node) path(name string) string { return filepath.Join(n.rack.Dir, n.Name+"."+name) }

// ssh returns an ssh command, not yet started, that runs a command in the guest.
func (n *node) ssh(ctx context.Context, command string, options ...string) *exec.Cmd {
	_, port, _ := net.SplitHostPort(n.address)
	args := append([]string{"-i", n.key, "-p", port, "-S", n.path("ssh"), "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o",
		"LogLevel=error", "-o", "ConnectTimeout=20"}, options...)
	return exec.CommandContext(ctx, "ssh", append(args, "root@127.0.0.1", command)...)
}

// run runs a command in the guest, and returns its output.
func (n *node) run(ctx context.Context, stdin io.Reader, command string) ([]byte, error) {
	c := n.ssh(ctx, command)
	var out, said bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = stdin, &out, &said
	if err := c.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("in instance %s: %s: %w: %s", n.Name, command, err, &said)
	}
	return out.Bytes(), nil
}

// changeImage gives the instance a new root disk, made from the current image in a directory.
func (n *node) changeImage(ctx context.Context, dir string) error {
	name, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		return fmt.Errorf("make the image of a newer Debian with make vm-image: %w", err)
	}
	if err := n.rack.StopInstance(ctx, n.ID); err != nil {
		return err
	}
	image, at := filepath.Join(dir, strings.TrimSpace(string(name))), filepath.Join(n.Guest, "machine")
	// QEMU may still have the old file open and locked, so remove the file and create a new one.
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
	// The connection must stay open after this call.
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

// sshd returns the address of the instance's sshd.
func (n *node) sshd(ctx context.Context) (string, error) {
	state, err := n.rack.Admin.State(ctx)
	for _, m := range state.Machines {
		if m.InstanceID == n.ID {
			return m.SSH, err
		}
	}
	return "", errors.Join(err, errors.New("it has no machine"))
}

// sever closes all connections to the guest, so that calls and commands fail as if the guest ended.
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

// kill kills the machine, waits until the rack reports a failed instance, and starts it again.
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

func (n *node) pause(ctx context.Context, d time.Duration) (err error) {
	defer harness.Catch(&err)
	process := harness.Got(n.qemu())
	harness.Must(process.Signal(syscall.SIGSTOP))
	after(ctx, d)
	return process.Signal(syscall.SIGCONT)
}

// after waits for the time d, or until ctx ends.
func after(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
