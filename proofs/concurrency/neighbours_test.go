//go:build linux

package concurrency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestMain(m *testing.M) { namespace.Main(m) }

const (
	asksPerVolume = 10
	// brief is the deadline of a call that may hang because its own disk hangs.
	brief = 500 * time.Millisecond
)

// While disks hang, fail or are locked by workloads, all node calls for other volumes must succeed
// in time. Repeated calls for a hanging volume must not each block a thread of the driver.
func TestAHangingOrFailingDiskDelaysOnlyItsOwnVolume(t *testing.T) {
	n := newNeighbours(t, harness.PluginOptions{}, time.Minute)
	n.live("first", kinds...) // fills the caches; only later calls are compared
	before := n.live("before", kinds...)
	n.inTrouble()
	during := n.live("during", kinds...)
	n.close()
	n.Proof.Figure("lives", n.lives, "stuck", n.stuck, "threads_grown", n.threads, "ratio",
		fmt.Sprintf("%.2f", during.Seconds()/before.Seconds()))
	if n.stuck > 0 || n.threads > 0 {
		t.Errorf("%d calls got stuck, and %d threads", n.stuck, n.threads)
	}
}

// A btrfs that hangs in a commit holds locks of the kernel that each mount and unmount of another
// btrfs needs. Volumes with other filesystems must not wait.
func TestAHangingBtrfsCommitDelaysOnlyBtrfsVolumes(t *testing.T) {
	n := newNeighbours(t, harness.PluginOptions{}, 20*time.Second)
	hangs := n.trouble("hangs-in-commit", "btrfs", true,
		adminapi.DiskFault{On: []string{"flush"}, Hang: true})
	n.commit(hangs)
	n.threadsBefore = n.waiting()
	n.ask(hangs)
	n.live("during", "ext4", "xfs", "block")
	n.close()
	if n.stuck > 0 || n.threads > 0 {
		t.Errorf("%d calls got stuck, and %d threads", n.stuck, n.threads)
	}
}

// waits contains parts of the node service (proof.Guard). Without one of them, a call waits for the
// disk or lock of another volume, or blocks a thread on a disk that hangs.
var waits = []proof.Guard{
	{Name: "an unstage reads no other disk", Edits: []proof.Edit{{
		Place: "node.heldVolume.stagedDisks", Text: "known, ok := v.record.load()",
		With: `TEXT
	if REMOVED && !ok {
		all, _ := v.node.host().List()
		for _, d := range all {
			if device, err := v.node.host().Open(d); err == nil {
				_, _ = device.Read(0, 4096)
				_ = device.Close()
			}
		}
	}`}}},
	{Name: "the health reads no device", Edits: []proof.Edit{{
		Place: "node.Service.volumeHealth", Text: "mounts := table.Of(d)",
		With: `TEXT
	if device, err := n.host().Open(d); REMOVED && err == nil {
		_, _ = device.Read(0, 4096)
	}`}}},
	{Name: "a workload's lock of its device is not waited for", Edits: []proof.Edit{{
		Place: "blockdev.Host.OpenLocked", Text: "unshared || d.lock == nil",
		With: "(REMOVED || (TEXT))"}}},
}

func TestTheDriverGetsStuckIfOneGuardAgainstWaitingIsRemoved(t *testing.T) {
	program := csitest.Got(proof.BuildMutant(t.Context(), t.TempDir(), waits))(t)
	for _, guard := range short.Some(t, 1, waits) {
		t.Run(guard.Name, func(t *testing.T) {
			n := newNeighbours(t, harness.PluginOptions{Command: []string{program},
				Env: map[string]string{proof.RemovedGuard: guard.Name}}, 5*time.Second)
			n.inTrouble()
			n.live("during", kinds...)
			n.close()
			if n.stuck == 0 && n.threads == 0 {
				t.Error("no call and no thread got stuck")
			}
		})
	}
}

type neighbours struct {
	*proof.Environment
	t          *testing.T
	controller csi.ControllerClient
	node       *harness.Plugin
	// limit is the deadline of a call that must not wait for the disk of another volume.
	limit                 time.Duration
	lives, stuck, threads int
	troubled              []*neighbour
	threadsBefore         int
	end                   []func()
}

func newNeighbours(t *testing.T, options harness.PluginOptions, limit time.Duration) *neighbours {
	t.Helper()
	env := csitest.Got(proof.New(t, "hung-neighbour").StartEnvironment(t.Context(), harness.RunFor(t),
		harness.RackOptions{Args: []string{"--disks=fuse"}}, "", proof.BtrfsMember))(t)
	controller := csitest.Got(env.StartPlugin(t.Context(),
		harness.PluginOptions{Mode: harness.ModeController}))(t)
	options.Mode = harness.ModeNode
	node := csitest.Got(env.StartPlugin(t.Context(), options))(t)
	csitest.Must(t, env.TakeBaseline(t.Context()))
	return &neighbours{Environment: env, t: t, controller: controller.Controller(), node: node,
		limit: limit}
}

type nodeCall = func(context.Context, csi.NodeClient) error

func (n *neighbours) converge(call nodeCall) {
	n.t.Helper()
	if err := harness.Await(n.t.Context(), 2*time.Minute, func() error {
		return call(n.t.Context(), n.node.Node())
	}); err != nil {
		n.t.Errorf("a call does not converge: %v", err)
	}
}

type neighbour struct {
	harness.Placement
	n *neighbours
}

func (p *neighbour) usage(ctx context.Context, node csi.NodeClient) error {
	_, err := p.Stats(ctx, node)
	return err
}

func (p *neighbour) health(ctx context.Context, node csi.NodeClient) error {
	return csitest.Call(ctx, node, &csi.NodeGetVolumeHealthRequest{
		VolumeId: p.Volume.GetVolumeId(), StagingTargetPath: p.Staging})
}

func (p *neighbour) data() harness.Data {
	return harness.Data{Rack: p.n.Rack, Target: p.Target, Raw: p.Capability.GetBlock() != nil,
		Seed: 1, PieceBytes: 4096}
}

func (n *neighbours) attach(name, fsType string) *neighbour {
	capability := harness.Access(fsType)
	p := &neighbour{n: n, Placement: harness.Placement{Capability: capability,
		Staging: n.node.Kubelet(name, "globalmount"), Target: n.node.Kubelet(name, "pod", "mount")}}
	csitest.Must(n.t, p.MakeDirs())
	n.converge(func(ctx context.Context, _ csi.NodeClient) error {
		made, err := n.controller.CreateVolume(ctx, harness.CreateRequest(name, capability))
		p.Volume = made.GetVolume()
		return err
	})
	n.converge(func(ctx context.Context, _ csi.NodeClient) error {
		req := harness.PublishRequest(p.Volume, n.node.Instance.ID)
		req.VolumeCapability = capability
		said, err := n.controller.ControllerPublishVolume(ctx, req)
		p.PublishContext = said.GetPublishContext()
		return err
	})
	return p
}

func (p *neighbour) remove() {
	p.n.converge(func(ctx context.Context, _ csi.NodeClient) error {
		return csitest.Call(ctx, p.n.controller, harness.UnpublishRequest(p.Volume, ""))
	})
	p.n.converge(func(ctx context.Context, _ csi.NodeClient) error {
		return csitest.Call(ctx, p.n.controller,
			&csi.DeleteVolumeRequest{VolumeId: p.Volume.GetVolumeId()})
	})
}

// call makes a call and counts it as stuck unless it succeeds within the limit.
func (n *neighbours) call(what string, call nodeCall) bool {
	err := n.within(n.limit, call)
	if err != nil {
		n.stuck++
		n.Proof.Say("%s: %v", what, err)
	}
	return err == nil
}

func (n *neighbours) within(limit time.Duration, call nodeCall) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), limit)
	defer cancel()
	return call(ctx, n.node.Node())
}

var kinds = []string{"ext4", "xfs", "btrfs", "block"}

// live creates, uses and deletes a volume of each kind, and returns how long the node's calls took.
func (n *neighbours) live(name string, kinds ...string) (took time.Duration) {
	for _, fsType := range kinds {
		p := n.attach(name+"-"+fsType, fsType)
		n.lives++
		begun := time.Now()
		if n.call("stage", p.Stage) && n.call("publish", p.Publish) {
			n.Proof.Error(errors.Join(p.data().Write(0, true), p.data().Verify(0)))
			n.call("usage", p.usage)
			n.call("health", p.health)
		}
		if n.call("unpublish", p.Unpublish) && n.call("unstage", p.Unstage) &&
			n.call("a repeated unstage", p.Unstage) { // the node does not know the volume any more
			took += time.Since(begun)
			p.remove()
			continue
		}
		n.troubled = append(n.troubled, p) // close removes it when all disks work again
	}
	return took
}

// inTrouble creates volumes that other volumes must not wait for: disks in use that hang or fail, a
// raw device that its workload has locked, a raw device under a loop device, and a blank disk that
// hangs during its first stage.
func (n *neighbours) inTrouble() {
	all := []string{"read", "write", "flush"}
	var asked []*neighbour
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		asked = append(asked, n.trouble("hangs-"+fsType, fsType, true,
			adminapi.DiskFault{On: all, Hang: true}))
	}
	n.trouble("fails", "ext4", true, adminapi.DiskFault{On: []string{"write", "flush"}})
	raw := n.trouble("locked", "block", true, adminapi.DiskFault{})
	device := n.openDevice(raw)
	csitest.Must(n.t, unix.Flock(int(device.Fd()), unix.LOCK_EX))
	n.end = append(n.end, func() { csitest.Must(n.t, device.Close()) })
	held := n.trouble("under-a-loop-device", "block", true, adminapi.DiskFault{})
	heldDevice := n.openDevice(held)
	loop, err := exec.Command("losetup", "--find", "--show", heldDevice.Name()).Output()
	csitest.Must(n.t, errors.Join(err, heldDevice.Close()))
	n.end = append(n.end, func() {
		csitest.Must(n.t, exec.Command("losetup", "--detach", strings.TrimSpace(string(loop))).Run())
	})
	n.call("unpublish what a loop device uses", held.Unpublish)
	if n.within(brief, held.Unstage) == nil {
		n.t.Errorf("a raw device was released although a loop device uses it")
	}
	blank := n.trouble("hangs-blank", "ext4", false, adminapi.DiskFault{On: all, Hang: true})
	if code := status.Code(n.within(brief, blank.Stage)); code != codes.DeadlineExceeded {
		n.t.Errorf("the stage of a blank disk that hangs ended with %s", code)
	}
	n.threadsBefore = n.waiting()
	n.ask(asked...)
	// The driver must publish and unpublish the raw device again although its workload has locked it.
	n.call("publish what its workload has locked", raw.Publish)
	n.call("unpublish what its workload has locked", raw.Unpublish)
}

// trouble creates a volume, publishes it if used is set, and then makes its disk hang or fail.
func (n *neighbours) trouble(name, fsType string, used bool, fault adminapi.DiskFault) *neighbour {
	ctx := n.t.Context()
	p := n.attach(name, fsType)
	n.troubled = append(n.troubled, p)
	if used {
		n.converge(p.Stage)
		n.converge(p.Publish)
		csitest.Must(n.t, p.data().Write(0, true))
	}
	if len(fault.On) > 0 {
		csitest.Must(n.t, n.Rack.Admin.FailDisk(ctx, p.Volume.GetVolumeId(), fault))
		n.end = append(n.end, func() {
			csitest.Must(n.t, n.Rack.Admin.HealDisk(ctx, p.Volume.GetVolumeId()))
		})
	}
	return p
}

func (n *neighbours) ask(of ...*neighbour) {
	for range asksPerVolume {
		for _, p := range of {
			_, _ = n.within(brief, p.health), n.within(brief, p.usage)
		}
	}
}

// commit writes a file, starts a sync, and returns when the sync waits for the disk.
func (n *neighbours) commit(p *neighbour) {
	f := csitest.Got(os.Create(filepath.Join(p.Target, "synced")))(n.t)
	csitest.Got(f.WriteString("the workload's last words"))(n.t)
	thread, synced := make(chan int, 1), make(chan struct{})
	go func() {
		defer close(synced)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		_ = unix.Syncfs(int(f.Fd()))
		_ = f.Close()
	}()
	n.end = append(n.end, func() { <-synced })
	stack := fmt.Sprintf("/proc/self/task/%d/stack", <-thread)
	csitest.Must(n.t, harness.Await(n.t.Context(), 10*time.Second, func() error {
		b, err := os.ReadFile(stack)
		if err == nil && !bytes.Contains(b, []byte("barrier_all_devices")) &&
			!bytes.Contains(b, []byte("write_all_supers")) {
			err = fmt.Errorf("the sync is not at the flush: %s", b)
		}
		return err
	}))
}

// openDevice opens a raw volume through the guest's device node. So the device is in use, but the
// published path is not.
func (n *neighbours) openDevice(p *neighbour) *os.File {
	disk := csitest.Got(n.node.Instance.Device(p.Volume.GetVolumeContext()["diskName"]))(n.t)
	device := csitest.Got(os.Open(disk.Path))(n.t)
	return device
}

// waiting counts the threads of the node's driver that wait for a disk (state D).
func (n *neighbours) waiting() (threads int) {
	all := csitest.Got(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", n.node.PID())))(n.t)
	for _, path := range all {
		b, _ := os.ReadFile(path) // the thread may have ended
		if at := bytes.LastIndexByte(b, ')'); at >= 0 && bytes.HasPrefix(b[at:], []byte(") D")) {
			threads++
		}
	}
	return threads
}

// close counts the threads that still wait for a disk, repairs all disks, and removes the volumes.
func (n *neighbours) close() {
	ctx := n.t.Context()
	// A thread may wait briefly although its disk is healthy.
	_ = harness.Await(ctx, 5*time.Second, func() error {
		if n.threads = n.waiting() - n.threadsBefore; n.threads > 0 {
			return fmt.Errorf("%d threads wait for a disk", n.threads)
		}
		return nil
	})
	n.threads = max(n.threads, 0)
	for _, end := range n.end {
		end()
	}
	for _, p := range n.troubled {
		n.converge(p.Unpublish)
		n.converge(p.Unstage) // repeats it, because the first try may report a failed unmount
		p.remove()
	}
	n.Proof.Error(errors.Join(n.Balance(ctx), n.Close()))
}
