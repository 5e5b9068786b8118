//go:build linux

package vm_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

func TestVolumesInVirtualMachinesKeepAcknowledgedData(t *testing.T) {
	p, count := proof.New(t, "vm-lives"), 16
	switch {
	case p.Short():
		count = 2
		t.Log("SHORT= make vm runs 16 lives")
	case p.Long():
		count = 50
	}
	if l := runLives(t, p, count); !t.Failed() {
		l.guard(t)
	}
}

func TestVolumesBehindPCIeRootPortsKeepAcknowledgedData(t *testing.T) {
	p, count := proof.New(t, "vm-lives-q35"), 2
	if p.Short() {
		count = 1
		t.Log("SHORT= make vm runs 2 lives")
	}
	l := runLives(t, p, count, "--vm-machine=q35")
	const bridges = "cat /sys/bus/pci/devices/*/class | grep -c 0x060400"
	n, err := l.nodes[0].run(t.Context(), nil, bridges)
	if got := strings.TrimSpace(string(n)); got != "12" || err != nil {
		t.Errorf("the machine has %q root ports, not 12: %v", got, err)
	}
	// Attach disks to the stopped machine, so that the firmware finds them when it numbers buses.
	l.nodes[0].sever()
	ctx, instance := t.Context(), l.nodes[0].ID
	must(t, l.rack.StopInstance(ctx, instance))
	var disks [2]string
	for i := range disks {
		disks[i] = harness.Need(l.rack.CreateDisk(ctx, l.rack.Project,
			fmt.Sprint("behind-port-", i), 1<<30))(t).Id
		must(t, l.rack.AttachDisk(ctx, disks[i], instance))
	}
	must(t, l.rack.StartInstance(ctx, instance))
	must(t, l.nodes[0].connect(ctx))
	n, err = l.nodes[0].run(ctx, nil, "cat /sys/block/nvme*/device/serial")
	for i, disk := range disks {
		if name := fmt.Sprint("behind-port-", i); !strings.Contains(string(n), name) || err != nil {
			t.Errorf("the guest has the disks %q, without %s: %v", n, name, err)
		}
		must(t, l.rack.DetachDisk(ctx, disk, instance))
		must(t, l.rack.DeleteDisk(ctx, disk))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func runLives(t *testing.T, p *proof.Proof, count int, args ...string) *lab {
	t.Helper()
	l, drawn := newLab(t, p, args...), 0
	for n := 0; n < count || p.Long() && count > 2 && !p.Over(); n++ {
		life := draw(p.Rand(), n)
		if p.Short() { // disturb the volume only by the kill of the machine
			life.cold, life.restore, life.pulls = false, false, life.pulls[1:]
		}
		drawn += len(life.pulls)
		if err := l.live(t.Context(), life); err != nil {
			t.Errorf("life %+v: %v", life, err)
			break
		}
		p.Say("life %d has ended: %+v", n, life)
	}
	p.Figure("lives", l.lives, "bytes_lost", l.lost, "stuck", l.stuck, "kinds",
		min(l.lives, len(filesystems)), "plugs", l.pulled, "killed", l.killed, "blocks_compared",
		l.compared, "kernels", strings.Join(l.kernels, "/"))
	if l.lives < count || l.pulled < drawn || l.killed < count || l.lost+l.stuck > 0 {
		t.Errorf("%d lives of %d with %d plugs of %d and %d kills, %d bytes are lost, %d calls are stuck",
			l.lives, count, l.pulled, drawn, l.killed, l.lost, l.stuck)
	}
	return l
}

// guard checks that compare() finds lost bytes. A writer acknowledges bytes that it has not synced,
// and then the machine is killed.
func (l *lab) guard(t *testing.T) {
	ctx, n := t.Context(), l.nodes[0]
	var err error
	defer func() { must(t, err) }()
	defer harness.Catch(&err)
	v := l.newLife(ctx, plan{number: l.lives, kind: "ext4",
		pulls: []pull{{plug: "killed", during: "write", delay: time.Second}}}, "")
	v.unsynced = true
	if err := v.visit(ctx, n, 0, nil); !errors.Is(err, errPulled) {
		t.Fatal("the machine of a guard was not killed: ", err)
	}
	v.makeDirs(ctx, n)
	harness.Must(v.at.Stage(ctx, n.node()))
	harness.Must(v.at.Publish(ctx, n.node()))
	if lost := v.compare(ctx, n); lost == 0 {
		t.Errorf("of %d records that nobody synced no byte is lost", v.acked)
	}
	harness.Must(v.at.Remove(ctx, n.node()))
	harness.Must(v.call("detach", n)(ctx))
	v.end(ctx)
}

const (
	// callTimeout is kubelet's timeout. A call that takes this long is stuck. convergence is how long
	// a call may be repeated until it succeeds.
	callTimeout = 2 * time.Minute
	convergence = 4 * time.Minute
	patience    = 30 * time.Second
	// recordBytes is the size of a record. A workload adds recordsRound records in each round.
	recordBytes  = 4096
	recordsRound = 40
	// manyRecords is more than a workload can write before the disturbance comes.
	manyRecords = 100000
)

var (
	filesystems = []string{"ext4", "xfs", "btrfs", "block"}
	// stages contains the orchestrator's calls and the workload's write on a node, in order.
	stages = []string{"attach", "stage", "publish", "write", "unpublish", "unstage", "detach"}
	// plugs contains the disturbances of a machine and of its disk.
	plugs = []string{"killed", "disk pulled", "reset", "paused", "disk put back"}
)

// plan contains the random choices for the life of a volume.
type plan struct {
	number, first        int // first is the node of the first round
	kind                 string
	pulls                []pull
	cold, moves, restore bool
}

// pull is a planned disturbance (plug): in this round, after this delay within the call "during".
type pull struct {
	plug, during string
	delay        time.Duration
	round        int
}

// draw returns a random plan. Successive plans have all kinds of volumes and all plugs. Each plan
// also kills the machine in a later round, when the volume has records. The first eight plans move
// each kind both ways between the kernels. A disk is pulled (detached) only while it is attached.
// Only an xfs is restored beside its origin: Linux 6.1 cannot mount a btrfs and its copy at once.
func draw(r *rand.Rand, number int) plan {
	p := plan{number: number, kind: filesystems[number%len(filesystems)],
		first: (number + number/4) % 2, moves: r.IntN(2) == 0 || number < 8,
		restore: number%4 == 1, cold: number%4 == 0}
	round := r.IntN(2)
	for i, plug := range []string{plugs[number%len(plugs)], "killed"} {
		at := stages
		if strings.HasPrefix(plug, "disk") {
			at = []string{"stage", "publish", "write", "unpublish", "unstage"}
		}
		// On average, more than half of the disturbances come while the workload writes.
		next := pull{plug: plug, during: "write", round: round + i,
			delay: time.Duration(r.Int64N(int64(2 * time.Second)))}
		if r.IntN(2) == 0 {
			next.during = at[r.IntN(len(at))]
			next.delay = time.Duration(r.Int64N(int64(300 * time.Millisecond)))
		}
		p.pulls = append(p.pulls, next)
	}
	return p
}

// lab is a rack of two machines with the driver's node service. The controller runs outside. The
// second machine has a newer kernel and newer tools.
type lab struct {
	*proof.Proof
	rack              *harness.Rack
	controller        csi.ControllerClient
	controllerAddress string
	nodes             []*node
	kernels           []string

	// compared is the number of records that were read again.
	lives, pulled, killed, lost, stuck, compared int
}

func newLab(t *testing.T, p *proof.Proof, args ...string) *lab {
	t.Helper()
	key := hostKey(t)
	run := harness.RunFor(t)
	run.Plain = true
	rack := harness.Need(run.StartRack(t.Context(), harness.RackOptions{
		Args: append(args, "--guests=vm", "--vm-image", imageDir(t))}))(t)
	l := &lab{Proof: p, rack: rack}
	driver := harness.Need(run.Binary(t.Context(), "oxide-csi-plugin"))(t)
	for _, i := range rack.Instances {
		l.nodes = append(l.nodes, &node{Instance: i, rack: rack, key: key, driver: driver})
	}
	t.Cleanup(func() { // the machines outlive the simulator
		ctx := context.WithoutCancel(t.Context())
		for _, n := range l.nodes {
			if t.Failed() {
				log, _ := n.run(ctx, nil, "tail -n 60 /root/driver.log; dmesg | tail -n 40")
				t.Logf("instance %s:\n%s", n.Name, log)
			}
			n.sever()
			if err := rack.StopInstance(ctx, n.ID); err != nil {
				t.Error(err)
			}
		}
		must(t, rack.Stop())
	})
	plugin := harness.Need(rack.StartPlugin(t.Context(),
		harness.PluginOptions{Mode: harness.ModeController}))(t)
	t.Cleanup(func() { must(t, plugin.Stop()) })
	l.controller, l.controllerAddress = plugin.Controller(), plugin.Endpoint
	must(t, l.nodes[1].changeImage(t.Context(), filepath.Join(imageDir(t), "newer")))
	var booted errgroup.Group
	for _, n := range l.nodes {
		booted.Go(func() error { return n.connect(t.Context()) })
	}
	must(t, booted.Wait())
	for _, n := range l.nodes {
		kernel := harness.Need(n.run(t.Context(), nil, "uname -r"))(t)
		l.kernels = append(l.kernels, strings.TrimSpace(string(kernel)))
	}
	if l.kernels[0] == l.kernels[1] {
		t.Errorf("both machines have the kernel %s", l.kernels[0])
	}
	p.Say("two machines have booted: %v", l.kernels)
	return l
}

type life struct {
	*lab
	plan
	volume *csi.Volume
	at     *harness.Placement
	// acked is the number of records that the guest has acknowledged: after an fsync or, if unsynced
	// is set, after a write.
	acked    int
	unsynced bool
	// plug is the last disturbance. pulling is set while it disturbs the present call.
	plug    string
	pulling bool
	// wrote receives a value when the guest acknowledges a record for which step() waits.
	wrote chan struct{}
}

// errPulled means that a disturbance (see pull) ended visit(), so visit() has to be called again.
var errPulled = errors.New("a plug was pulled")

func (l *lab) newLife(ctx context.Context, p plan, snapshot string) *life {
	v := &life{lab: l, plan: p}
	req := harness.CreateRequest(fmt.Sprintf("pvc-%d-%d", p.number, l.lives), harness.Access(p.kind))
	if snapshot != "" {
		harness.FromSnapshot(req, snapshot)
		req.Name += "-restored"
	}
	v.until(ctx, "create", func(ctx context.Context) error {
		resp, err := l.controller.CreateVolume(ctx, req)
		v.volume = resp.GetVolume()
		return err
	})
	dir := "/var/lib/kubelet/" + req.Name
	v.at = &harness.Placement{Volume: v.volume, Capability: harness.Access(p.kind),
		Staging: dir + "/globalmount", Target: dir + "/pod/mount"}
	return v
}

// until repeats a call until it succeeds, as an orchestrator does.
func (v *life) until(ctx context.Context, what string, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, convergence)
	defer cancel()
	backoff := harness.Backoff{Next: 20 * time.Millisecond, Max: time.Second}
	for {
		once, cancel := context.WithTimeout(ctx, callTimeout)
		err := call(once)
		overdue := once.Err() != nil
		cancel()
		if err == nil {
			return
		}
		v.Say("life %d: %s: %s", v.number, what, status.Convert(err).Message())
		switch code := status.Code(err); {
		case overdue:
			v.stuck++
			harness.Must(fmt.Errorf("%s is stuck: %w", what, err))
		case code == codes.DataLoss || code == codes.InvalidArgument || code == codes.Unimplemented:
			harness.Must(fmt.Errorf("%s: no orchestrator repeats it: %w", what, err))
		}
		if backoff.Wait(ctx) != nil {
			v.stuck++
			harness.Must(fmt.Errorf("%s does not converge: %w", what, err))
		}
	}
}

// call returns a function that makes an orchestrator's call for a node, or runs the workload there.
func (v *life) call(what string, n *node) func(context.Context) error {
	return map[string]func(context.Context) error{
		"attach": func(ctx context.Context) error {
			req := harness.PublishRequest(v.volume, n.ID)
			req.VolumeCapability = v.at.Capability
			resp, err := v.controller.ControllerPublishVolume(ctx, req)
			v.at.PublishContext = resp.GetPublishContext()
			return err
		},
		"stage":     func(ctx context.Context) error { return v.at.Stage(ctx, n.node()) },
		"publish":   func(ctx context.Context) error { return v.at.Publish(ctx, n.node()) },
		"write":     func(ctx context.Context) error { return v.write(ctx, n) },
		"unpublish": func(ctx context.Context) error { return v.at.Unpublish(ctx, n.node()) },
		"unstage":   func(ctx context.Context) error { return v.at.Unstage(ctx, n.node()) },
		"detach": func(ctx context.Context) error {
			_, err := v.controller.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(v.volume, n.ID))
			return err
		},
	}[what]
}

// step makes the call "what" on node n. If the next disturbance is planned for this call in this
// round, step causes it.
func (v *life) step(ctx context.Context, n *node, round int, what string) {
	call := v.call(what, n)
	if len(v.pulls) == 0 || round != v.pulls[0].round || what != v.pulls[0].during {
		v.until(ctx, what, call)
		return
	}
	next := v.pulls[0]
	v.plug, v.pulls, v.pulling, v.wrote = next.plug, v.pulls[1:], true, make(chan struct{}, 1)
	v.Say("life %d: %s during %s, after %s", v.number, v.plug, what, next.delay)
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		ended <- call(ctx)
	}()
	if what == "write" { // a writer takes a while to start
		select {
		case <-v.wrote:
		case failed := <-ended: // the call ended without a record
			ended <- failed
		}
	}
	after(ctx, next.delay)
	err := v.pull(ctx, n)
	start := time.Now()
	failed := <-ended
	v.pulling = false
	if failed != nil {
		v.Say("life %d: %s ended so: %s", v.number, what, status.Convert(failed).Message())
	}
	if time.Since(start) >= callTimeout-time.Second {
		v.stuck++
		err = errors.Join(err, fmt.Errorf("%s is stuck after the plug: %s", what, v.plug))
	}
	harness.Must(err)
	v.pulled++
	if v.plug == "killed" {
		v.killed++
	}
	v.recover(ctx, n)
}

func (v *life) pull(ctx context.Context, n *node) error {
	switch v.plug {
	case "killed":
		return n.kill(ctx)
	case "reset":
		_, err := v.rack.Client.InstanceReboot(ctx,
			oxide.InstanceRebootParams{Instance: oxide.NameOrId(n.ID)})
		n.sever()
		return err
	case "paused":
		return n.pause(ctx, 3*time.Second)
	}
	disk := v.volume.GetVolumeId()
	if err := v.rack.DetachDisk(ctx, disk, n.ID); err != nil || v.plug != "disk put back" {
		return err
	}
	return harness.Await(ctx, patience, func() error { return v.rack.AttachDisk(ctx, disk, n.ID) })
}

// recover prepares the node for a new visit, as an orchestrator does: it waits for the node's boot,
// or removes the volume from the node. Then it ends the visit with errPulled. A pause needs no
// preparation, because the orchestrator may repeat every call.
func (v *life) recover(ctx context.Context, n *node) {
	again := map[string][]string{"disk pulled": {"unpublish", "unstage", "detach"},
		"disk put back": {"unpublish", "unstage"}}
	if v.plug == "killed" || v.plug == "reset" {
		harness.Must(n.connect(ctx))
	}
	for _, what := range again[v.plug] {
		v.until(ctx, what+" again", v.call(what, n))
	}
	harness.Must(errPulled)
}

func (v *life) attachCold(ctx context.Context, n *node) {
	n.sever()
	harness.Must(v.rack.StopInstance(ctx, n.ID))
	v.until(ctx, "attach", v.call("attach", n))
	harness.Must(v.rack.StartInstance(ctx, n.ID))
	harness.Must(n.connect(ctx))
}

// visit brings the volume to a node, verifies its data, writes more, and removes it from the node.
// If beside is not nil, visit calls beside() while the volume is published.
func (v *life) visit(ctx context.Context, n *node, round int, beside func()) (err error) {
	defer harness.Catch(&err)
	v.makeDirs(ctx, n)
	for _, what := range stages {
		switch what {
		case "write":
			v.verify(ctx, n)
		case "unpublish":
			if beside != nil {
				beside()
			}
		}
		v.step(ctx, n, round, what)
	}
	return nil
}

func (v *life) makeDirs(ctx context.Context, n *node) {
	harness.Got(n.run(ctx, nil, fmt.Sprintf("mkdir -p %s %s", v.at.Staging,
		filepath.Dir(v.at.Target))))
}

func (v *life) record(n int) string {
	line := fmt.Sprintf("life %d seed %d record %d\n", v.number, v.Seed, n)
	return strings.Repeat(line, recordBytes)[:recordBytes]
}

func (v *life) place() string {
	if v.kind == "block" {
		return v.at.Target
	}
	return v.at.Target + "/records"
}

// writer is a Perl program. It writes numbered records to one file, and other bytes, which it never
// syncs, to a second file. For a raw device, both files are the device, which begins with records.
const writer = `use IO::Handle; $| = 1; my ($f, $d, $n, $end, $sync, $of) = @ARGV;
sub put { my ($to, $at, $what) = @_;
	sysseek($to, $at, 0) && syswrite($to, $what) == length $what or die "write: $!" }
open(my $o, "+<", $f) && open(my $dirty, "+<", $d) or die $!;
for (; $n < $end; $n++) {
	put($o, $n * 4096, substr("$of record $n\n" x 300, 0, 4096));
	!$sync || $o->sync or die "sync: $!";
	print "$n\n";
	put($dirty, (64 << 20) + $n % 4096 * 65536, "\0" x 65536);
	select undef, undef, undef, 0.005
}`

func (v *life) write(ctx context.Context, n *node) error {
	count, sync := recordsRound, "1"
	if v.pulling && v.plug != "paused" {
		count = manyRecords
	}
	if v.unsynced {
		sync = "0"
	}
	script := fmt.Sprintf("f=%s; [ -b $f ] && d=$f || "+
		"{ d=$f.dirty; : >>$f; : >>$d; sync $f ${f%%/*}; }; "+
		"exec perl -e '%s' $f $d %d %d %s 'life %d seed %d'",
		v.place(), writer, v.acked, v.acked+count, sync, v.number, v.Seed)
	c := n.ssh(ctx, script)
	var said strings.Builder
	c.Stderr = &said
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return err
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		number, err := strconv.Atoi(lines.Text())
		if err != nil || number != v.acked {
			return fmt.Errorf("the writer acknowledges %q instead of %d", lines.Text(), v.acked)
		}
		v.acked++
		select {
		case v.wrote <- struct{}{}:
		default: // nobody waits for it
		}
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("the writer: %w: %s", err, &said)
	}
	return nil
}

func (v *life) verify(ctx context.Context, n *node) {
	if v.acked == 0 {
		return
	}
	lost := v.compare(ctx, n)
	v.lost += lost
	v.compared += v.acked
	if lost > 0 {
		harness.Must(fmt.Errorf("%d of %d acknowledged bytes are lost", lost, v.acked*recordBytes))
	}
}

func (v *life) compare(ctx context.Context, n *node) (lost int) {
	got := harness.Got(n.run(ctx, nil, fmt.Sprintf(
		"dd if=%s bs=%d count=%d iflag=direct status=none", v.place(), recordBytes, v.acked)))
	for i := range v.acked {
		want := v.record(i)
		for j := range want {
			if at := i*recordBytes + j; at >= len(got) || got[at] != want[j] {
				lost++
			}
		}
	}
	return lost
}

func (l *lab) live(ctx context.Context, p plan) (err error) {
	defer harness.Catch(&err)
	l.lives++
	v := l.newLife(ctx, p, "")
	at := []*node{l.nodes[p.first], l.nodes[p.first]}
	if p.moves {
		at[1] = l.nodes[1-p.first]
	}
	for round, n := range append(at, at[1]) {
		if p.cold && round == 1 {
			v.attachCold(ctx, n)
		}
		var beside func()
		if p.restore && round == 1 {
			beside = func() { v.restored(ctx, n) }
		}
		err := v.visit(ctx, n, round, beside)
		if errors.Is(err, errPulled) {
			err = v.visit(ctx, n, round, beside)
		}
		if err != nil {
			return fmt.Errorf("on %s: %w", n.Name, err)
		}
	}
	v.end(ctx)
	return nil
}

func (v *life) end(ctx context.Context) {
	v.until(ctx, "delete", func(ctx context.Context) error {
		_, err := v.controller.DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: v.volume.GetVolumeId()})
		return err
	})
}

// restored takes and restores a snapshot, and uses the new volume beside the original on the node.
func (v *life) restored(ctx context.Context, n *node) {
	var id string
	v.until(ctx, "snapshot", func(ctx context.Context) error {
		resp, err := v.controller.CreateSnapshot(ctx, harness.SnapshotRequest(
			fmt.Sprintf("snapshot-%d", v.number), v.volume.GetVolumeId()))
		id = resp.GetSnapshot().GetSnapshotId()
		return err
	})
	same := v.plan
	same.pulls = nil
	c := v.newLife(ctx, same, id)
	c.acked = v.acked
	if err := c.visit(ctx, n, 0, func() { v.verify(ctx, n) }); err != nil {
		harness.Must(fmt.Errorf("beside its origin: %w", err))
	}
	c.end(ctx)
	v.until(ctx, "delete the snapshot", func(ctx context.Context) error {
		_, err := v.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		return err
	})
}
