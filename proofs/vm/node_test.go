//go:build linux

package vm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// bootTime is how long a guest may take until its sshd answers.
const bootTime = 10 * time.Minute

func imageDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("OXIDE_VM_IMAGE")
	if dir == "" {
		t.Skip("virtual machines boot in make vm, and need minutes")
	}
	return dir
}

// hostKey returns the file of the ssh key that every guest accepts.
func hostKey(t *testing.T) string {
	t.Helper()
	return harness.Need(machine.Open(t.Context(), imageDir(t)))(t).Key()
}

// node is an instance that runs as a virtual machine, with the driver's node service in it. One ssh
// connection to the machine forwards the driver's socket and carries all commands.
type node struct {
	harness.Instance
	rack *harness.Rack
	// key is the private key that the guest accepts. driver is the program to copy to the guest.
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

// kill kills the machine, waits until the instance has failed, and starts the instance again.
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

func after(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// TestKeeperRestartsAVirtualMachineToAttachAVolume runs on a rack without hot-plug. The test acts
// as the attacher and the node's kubelet. The keeper stops and starts the machine.
func TestKeeperRestartsAVirtualMachineToAttachAVolume(t *testing.T) {
	if testing.Short() {
		t.Skip("SHORT= make vm runs it")
	}
	p := proof.New(t, "vm-cold-attach")
	l, ctx := newLab(t, p), t.Context()
	var failed error // of a step
	defer func() { must(t, failed) }()
	defer harness.Catch(&failed)
	harness.Must(l.rack.Admin.Switch(ctx, map[string]any{"hotplug": "none"}))
	n := l.nodes[0]
	v := l.newLife(ctx, plan{kind: "ext4"}, "")
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	before := harness.Got(n.run(ctx, nil, bootID))

	api := keepertest.Serve(t, time.Now)
	kube, _ := api.Client("keeper")
	client := harness.Got(keeper.Connect(kube, "keeper"))
	racks, closeIdle, err := rack.New(rack.Options{Host: l.rack.URL, Project: l.rack.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: l.rack.Token}})
	harness.Must(err)
	defer closeIdle()
	k := &keeper.Keeper{Config: keeper.Defaults(), Kubernetes: client, Rack: racks,
		Namespace: "oxide", Log: slog.New(slog.DiscardHandler), Metrics: keeper.NewMetrics()}
	k.Config.ColdAttach, k.Config.Settle, k.Config.NodeName = true, 0, "z"
	// Machines without KVM may take long to boot.
	k.Config.StartTimeout, k.Config.ReturnTimeout = bootTime, bootTime

	made := keepertest.Put(api, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name,
		Labels: map[string]string{keeper.ColdAttachLabel: keeper.Allowed}}})
	keepertest.Put(api, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n.Name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name,
			UID: made.UID}}}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
		{Name: keeper.DriverName, NodeID: n.ID}}}})
	data := "data"
	keepertest.Bind(api,
		keepertest.Volume("shop", data, keeper.DriverName, v.volume.GetVolumeId()))
	keepertest.Put(api, keepertest.Pod("shop", data, n.Name, data))
	keepertest.Put(api, &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: data},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: keeper.DriverName, NodeName: n.Name,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &data}}})

	attached, stops, up := false, 0, true
	harness.Must(harness.Await(ctx, 2*bootTime, func() error {
		instance := harness.Got(l.rack.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(n.ID)}))
		runs := instance.RunState == oxide.InstanceStateRunning
		if up && !runs {
			stops++
			n.sever()
		}
		if !up && runs {
			harness.Must(n.connect(ctx)) // kubelet reports when the guest has booted
		}
		up = runs
		keepertest.Edit(api, "", n.Name, func(o *corev1.Node) {
			ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}
			if up {
				ready.Status, ready.LastHeartbeatTime = corev1.ConditionTrue, metav1.Now()
			}
			o.Status.Conditions = []corev1.NodeCondition{ready}
		})
		if !attached {
			once, cancel := context.WithTimeout(ctx, callTimeout)
			err := v.call("attach", n)(once)
			cancel()
			attached = err == nil
			keepertest.Edit(api, "", data, func(a *storagev1.VolumeAttachment) {
				a.Status = storagev1.VolumeAttachmentStatus{Attached: attached}
				if err != nil {
					a.Status.AttachError = &storagev1.VolumeError{Time: metav1.Now(), Message: err.Error()}
				}
			})
		}
		if _, err := k.Round(ctx); err != nil {
			return err
		}
		if node, _ := keepertest.Get[*corev1.Node](api, "", n.Name); !attached || !up || stops == 0 ||
			node.Spec.Unschedulable {
			return errors.New("the volume is not attached to a node that takes pods")
		}
		return nil
	}))
	v.makeDirs(ctx, n)
	for _, what := range []string{"stage", "publish", "write"} {
		harness.Must(v.call(what, n)(ctx))
	}
	v.verify(ctx, n)
	after := harness.Got(n.run(ctx, nil, bootID))
	if stops != 1 || string(after) == string(before) {
		t.Errorf("the machine was stopped %d times, its boots are %s and %s", stops, before, after)
	}
	harness.Must(v.at.Remove(ctx, n.node()))
	p.Figure("stops", stops, "blocks_compared", v.compared, "bytes_lost", v.lost)
}

// TestNodeServiceInAVirtualMachinePassesCSISanity runs csi-sanity's specs of the node service for
// one kind of volume. csi-sanity makes its directories in the machine, where the node service runs.
// The controller runs outside.
func TestNodeServiceInAVirtualMachinePassesCSISanity(t *testing.T) {
	if testing.Short() {
		t.Skip("SHORT= make vm runs it")
	}
	p := proof.New(t, "vm-csi-sanity")
	l := newLab(t, p)
	n := l.nodes[0]
	combination := csisuite.Combination{Split: true, Filesystem: filesystems[p.Rand().IntN(3)]}
	config := combination.Config()
	csisuite.Place(config, "/var/lib")
	config.ControllerAddress, config.Address = l.controllerAddress, "unix://"+n.path("sock")
	in := func(command, path string) (string, error) {
		out, err := n.run(context.WithoutCancel(t.Context()), nil, command+" "+path)
		return string(out), err
	}
	create := func(path string) (string, error) {
		_, err := in("mkdir", path)
		return path, err
	}
	remove := func(path string) error {
		_, err := in("rmdir", path)
		if err != nil {
			t.Error(err) // csi-sanity ignores it
		}
		return err
	}
	config.CreateTargetDir, config.CreateStagingDir = create, create
	config.RemoveTargetPath, config.RemoveStagingPath = remove, remove
	config.CheckPath = func(path string) (csisanity.PathKind, error) {
		kind, err := in("f() { stat -c %F $1 2>/dev/null || echo none; }; f", path)
		switch kind {
		case "directory\n":
			return csisanity.PathIsDir, err
		case "none\n":
			return csisanity.PathIsNotFound, err
		}
		return csisanity.PathIsOther, err
	}
	suite := csisanity.GinkgoTest(config)
	defer suite.Finalize()
	specs := 0
	ginkgo.ReportAfterSuite("count", func(r ginkgo.Report) {
		specs = r.SpecReports.WithLeafNodeType(types.NodeTypeIt).CountWithState(types.SpecStatePassed)
	})
	gomega.RegisterFailHandler(ginkgo.Fail)
	csisuite.Quiet()
	chosen, reporter := ginkgo.GinkgoConfiguration()
	chosen.FocusStrings, reporter.NoColor, reporter.SilenceSkips = []string{"Node Service"}, true, true
	passed := ginkgo.RunSpecs(t, "csi-sanity", chosen, reporter)
	mounts, err := in("grep -c /var/lib/ /proc/mounts || :", "")
	if err != nil || mounts != "0\n" || !passed || specs < 20 {
		t.Errorf("%d specs passed: %v; mounts are left: %q, %v", specs, passed, mounts, err)
	}
	p.Figure("kind", combination.Access(), "specs", specs)
}
