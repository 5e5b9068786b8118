package conformance

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// inventory lists the objects of a project.
type inventory []item

// item is an instance, a disk, a snapshot or an image. Its kind is one of these words.
type item struct {
	kind, id           string
	name               oxide.Name
	description, state string
	size               oxide.ByteCount
	// disk is nil unless the item is a disk.
	disk *oxide.Disk
}

func (w *job) inventory(ctx context.Context) (all inventory, err error) {
	client, project := w.client, w.projectName
	instances, err := client.InstanceListAllPages(ctx, oxide.InstanceListParams{Project: project})
	for _, n := range instances {
		all = append(all, item{"instance", n.Id, n.Name, n.Description, string(n.RunState), 0, nil})
	}
	// If the rack does not answer, each list takes long. So the first error ends the inventory.
	if err != nil {
		return all, briefly("list the project's instances", err)
	}
	disks, err := client.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
	for _, d := range disks {
		all = append(all, item{"disk", d.Id, d.Name, d.Description, string(d.State.State()), d.Size, &d})
	}
	if err != nil {
		return all, briefly("list the project's disks", err)
	}
	snapshots, err := client.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: project})
	for _, s := range snapshots {
		all = append(all, item{"snapshot", s.Id, s.Name, s.Description, string(s.State), s.Size, nil})
	}
	if err != nil {
		return all, briefly("list the project's snapshots", err)
	}
	images, err := client.ImageListAllPages(ctx, oxide.ImageListParams{Project: project})
	for _, m := range images {
		all = append(all, item{"image", m.Id, m.Name, m.Description, "", m.Size, nil})
	}
	return all, briefly("list the project's images", err)
}

// count returns how many objects and attachments there are, for the report's ledger.
func (i inventory) count() map[string]int {
	count := map[string]int{"disks": 0, "snapshots": 0, "instances": 0, "attachments": 0}
	for _, one := range i {
		if one.kind != "image" {
			count[one.kind+"s"]++
		}
		if one.attachedTo() != "" {
			count["attachments"]++
		}
	}
	return count
}

// attachedTo returns the ID of the instance to which a disk is attached, or "".
func (i item) attachedTo() string {
	if i.disk != nil {
		if attached, is := i.disk.State.AsAttached(); is {
			return attached.Instance
		}
	}
	return ""
}

// run returns the ID of the run that created an object, itself or through its driver. The driver
// creates no instances.
func (i item) run() (run string, ok bool) {
	if i.kind == "instance" && !isMark(i.description) {
		return "", false
	}
	return runOf(i.description)
}

func (i inventory) of(run string) inventory {
	return slices.DeleteFunc(slices.Clone(i), func(one item) bool {
		of, ok := one.run()
		return !ok || of != run
	})
}

func (i inventory) names() (names []string) {
	for _, one := range i {
		about := fmt.Sprintf("%d GiB", int64(one.size)/harness.GiB)
		switch one.kind {
		case "instance":
			about = one.state
		case "disk":
			about += ", " + one.state
		}
		names = append(names, fmt.Sprintf("%s %s (%s)", one.kind, one.name, about))
	}
	return names
}

func isUUID(s string) bool { return len(s) == 36 && uuid.Validate(s) == nil }

// meet records which disks are attached to an instance that the run may stop, and returns an error
// if somebody else uses the instance.
func (w *job) meet(ctx context.Context, instance *oxide.Instance) error {
	disks, err := w.disksOf(ctx, instance.Id)
	if err != nil {
		return err
	}
	if w.known == nil {
		w.known = map[string]bool{}
	}
	for _, d := range disks {
		w.known[d.Id] = true
	}
	return w.mayStop(ctx, instance.Id)
}

// mayStop returns an error if somebody else may use an instance: it is in another project, a run
// created it, or another run names it. An attached disk is a sign, too, if it belongs to another
// run or to a cluster, or was attached since the preflight.
func (w *job) mayStop(ctx context.Context, id string) error {
	instance, err := w.find(ctx, id)
	if err != nil {
		return err
	}
	left := func(format string, args ...any) error {
		return fmt.Errorf("instance %s was left as it is: %s", instance.Name,
			fmt.Sprintf(format, args...))
	}
	if isMark(instance.Description) {
		return left("a run has made it")
	}
	attached, err := w.disksOf(ctx, id)
	if err != nil {
		return err
	}
	for _, d := range attached {
		run, of := runOf(d.Description)
		switch {
		case of && (run == w.id || w.dead[run]):
		case of:
			return left("the disk %s of run %s is attached to it", d.Name, run)
		case strings.HasPrefix(d.Description, driverWord):
			return left("the volume %s of a cluster is attached to it", d.Name)
		case d.Id != instance.BootDiskId && !w.known[d.Id]:
			return left("the disk %s, which is not the run's, is attached to it", d.Name)
		}
	}
	all, err := w.client.DiskListAllPages(ctx, oxide.DiskListParams{Project: w.projectName})
	if err != nil {
		return fmt.Errorf("list the project's disks: %s", rules.Brief(err))
	}
	for _, d := range all {
		if m, is := parseMark(d.Description); is && m.Run != w.id && !w.dead[m.Run] &&
			slices.Contains(m.Instances, id) {
			return left("run %s on %s uses it; if that has ended: oxide-conformance clean --run %s",
				m.Run, m.Host, m.Run)
		}
	}
	return nil
}

func (w *job) disksOf(ctx context.Context, instance string) ([]oxide.Disk, error) {
	disks, err := w.client.InstanceDiskListAllPages(ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(instance)})
	if err != nil {
		return nil, fmt.Errorf("list the disks of instance %s: %s", instance, rules.Brief(err))
	}
	return disks, nil
}

// prefix and the run's ID form the cluster ID of the run's driver. Reports call it the run's mark.
const prefix = "oxide-conformance-"

// mark is, as JSON, the description of every object that a run creates without its driver. The disk
// that a run creates first and deletes last has all fields, other objects only Run.
type mark struct {
	// Run is the run's ID: 8 hexadecimal digits.
	Run string `json:"run"`
	// Host is the name of the machine on which the run works, PID the program's process ID there, and
	// Boot the machine's bootID.
	Host string `json:"host,omitempty"`
	PID  int    `json:"pid,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Start is the start time of the process, because a later process may have the same ID.
	Start string `json:"start,omitempty"`
	// Began is the time when the run began.
	Began *time.Time `json:"began,omitempty"`
	// Instances are the IDs of the instances to which the run attaches disks. The first one is the
	// instance in which it runs. Helper is the ID of the instance that it starts and stops.
	Instances []string `json:"instances,omitempty"`
	Helper    string   `json:"helper,omitempty"`
}

// markWord begins every description that is a mark.
const markWord = "oxide-conformance "

func newRunID() string {
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

var isRunID = regexp.MustCompile(`^[0-9a-f]{8}$`).MatchString

// whole reports whether the mark is that of the disk which describes its run.
func (m mark) whole() bool { return m.Host != "" && m.Began != nil }

func (m mark) description() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // cannot fail: strings, a number and a time
	}
	return markWord + string(text)
}

func parseMark(description string) (m mark, ok bool) {
	text, ok := strings.CutPrefix(description, markWord)
	if !ok || json.Unmarshal([]byte(text), &m) != nil || !isRunID(m.Run) {
		return mark{}, false
	}
	return m, true
}

func isMark(description string) bool {
	_, is := parseMark(description)
	return is
}

// driverWord begins the description of every object that the driver creates.
const driverWord = "csi.oxide.computer "

// runOf returns the run that created an object, from the description that the run or its driver
// wrote. It ignores names, because anybody may choose them.
func runOf(description string) (run string, ok bool) {
	if m, ok := parseMark(description); ok {
		return m.Run, true
	}
	text, ok := strings.CutPrefix(description, driverWord)
	if !ok {
		return "", false
	}
	var tag struct {
		Cluster string `json:"cluster"`
	}
	if json.Unmarshal([]byte(text), &tag) != nil {
		return "", false
	}
	run, ok = strings.CutPrefix(tag.Cluster, prefix)
	return run, ok && isRunID(run)
}

// maxNameLength is the longest name that CSI allows, which csi-sanity uses.
const maxNameLength = 128

// withMark puts the mark before the name of every volume and snapshot in a request to create one.
// csi-sanity has fixed names, and runs in one project once for each kind of access.
func withMark(mark string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		// The request is copied, because csi-sanity sends some requests again.
		switch asked := req.(type) {
		case *csi.CreateVolumeRequest:
			marked := proto.Clone(asked).(*csi.CreateVolumeRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		case *csi.CreateSnapshotRequest:
			marked := proto.Clone(asked).(*csi.CreateSnapshotRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

// markedName returns the name with the mark before it. An empty name stays empty, because
// csi-sanity expects an error for it. A long name is cut to the limit and stays unique.
func markedName(mark, name string) string {
	if name == "" {
		return ""
	}
	marked := mark + "-" + name
	if len(marked) <= maxNameLength {
		return marked
	}
	sum := sha256.Sum256([]byte(name))
	tail := "-" + hex.EncodeToString(sum[:4])
	return marked[:maxNameLength-len(tail)] + tail
}

// errAttach is the error of a rack that attaches no disks, attaches them only sometimes, or does
// not show them to the instance.
type errAttach struct{ error }

// learnHotplug finds out whether the rack attaches a disk to this running instance. The rack has no
// hot-plug if it refuses with the known error and then attaches the same disk to a stopped
// instance. Any other refusal is a failure of attach.
//
// A rack that attaches but does not detach would leave the disk here until this instance stops. So
// the first trial uses an instance that the run creates. The rule checks report a failed trial.
func (w *job) learnHotplug(ctx context.Context) (err error) {
	trial, result := w.rack.TryHotplug(ctx)
	w.exchanges = append(w.exchanges, result.Exchanges...)
	w.behaviours = trial.Says
	if trial.Attaches && !trial.Detaches {
		w.rack.AttachOnly, w.report.Rack.HotPlug = true, report.HotPlugAttachOnly
		return nil
	}
	disk, err := w.createDisk(ctx, "hotplug", mark{Run: w.id})
	if err != nil {
		return err
	}
	run := deadRun{id: w.id, mark: mark{Instances: []string{w.here.Id}}}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		now, errLook := w.look(ctx, disk.Id)
		if errLook == nil {
			errLook = w.removeDisk(ctx, run, *now)
		}
		err = errors.Join(err, briefly("remove the disk of the trial", errLook))
	}()
	refused := w.attach(ctx, disk.Id, w.here.Id)
	if refused == nil {
		w.rack.Hotplug, w.report.Rack.HotPlug = true, report.HotPlugYes
		if err := w.learnRemoval(ctx, disk); err != nil {
			return err
		}
		trial, result := w.rack.TryRefusal(ctx)
		w.exchanges = append(w.exchanges, result.Exchanges...)
		w.behaviours = append(w.behaviours, trial.Says...)
		return nil
	}
	if !rules.SaysNotStopped(refused) {
		if now, err := w.look(ctx, disk.Id); err == nil {
			if says := rules.Recorded(refused, now, w.here.Id); says != "" {
				return errAttach{fmt.Errorf("attach: %s", strings.Join(append(w.behaviours, says), "; "))}
			}
		}
		return errAttach{fmt.Errorf("attach: expected that the rack attaches a disk to this "+
			"instance, or refuses because it is not stopped; found %s", rules.Brief(refused))}
	}
	var stopped *oxide.Instance
	busy, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	if err := rules.Patiently(busy, func(ctx context.Context) (err error) {
		stopped, err = w.rack.StoppedInstance(ctx)
		return err
	}); err != nil {
		return fmt.Errorf("make a stopped instance to attach to: %s", rules.Brief(err))
	}
	run.mark.Instances = append(run.mark.Instances, stopped.Id)
	if err := w.onlyToStopped(ctx, disk.Id, stopped.Id, w.here.Id, refused); err != nil {
		return err
	}
	w.report.Rack.HotPlug = report.HotPlugNo
	return nil
}

// These limit how long an instance may take to show the device of an attached disk. A simulated
// rack with an admin listener shows it at once.
const (
	deviceTimeout          = 30 * time.Second
	simulatedDeviceTimeout = 5 * time.Second
)

// learnRemoval waits for the device of the trial's disk. Then it detaches the disk, and measures
// how long a program can still read the device.
func (w *job) learnRemoval(ctx context.Context, disk *oxide.Disk) error {
	serial, timeout := rules.SerialOf(disk.Name), deviceTimeout
	if w.rack.Admin != nil {
		timeout = simulatedDeviceTimeout
	}
	var shown guest.Device
	err := harness.Await(ctx, timeout, func() error {
		devices, err := guest.Devices(w.sysfsRoot)
		if err != nil {
			return err
		}
		var found []string
		for _, d := range devices {
			if d.Serial == serial {
				shown = d
				return nil
			}
			found = append(found, d.Serial)
		}
		return fmt.Errorf("expected a device with the serial %q in this instance; found %q", serial,
			found)
	})
	if err != nil { // the run ends, because every later volume would wait for its device in vain
		return errors.Join(errAttach{fmt.Errorf("attach: the rack attached a disk, but %w", err)},
			briefly("detach the disk of the trial from this instance",
				w.detach(ctx, disk.Id, w.here.Id)))
	}
	device, err := shown.Open(w.devRoot)
	if err != nil {
		return errors.Join(err, w.detach(ctx, disk.Id, w.here.Id))
	}
	defer device.Close()
	began, gone := time.Now(), make(chan time.Duration, 1)
	go func() {
		if last, is := readUntilGone(device, int64(disk.Size), began); is {
			gone <- last
		}
	}()
	if err := w.detach(ctx, disk.Id, w.here.Id); err != nil {
		return briefly("detach the disk of the trial from this instance", err)
	}
	took := time.Since(began)
	select {
	case last := <-gone:
		w.behaviours = append(w.behaviours, fmt.Sprintf("a detach takes a disk from a program that has "+
			"it open: the program could read for %.1f s after the request, which took %.1f s",
			last.Seconds(), took.Seconds()))
	case <-time.After(deviceGrace): // it stays, which a data check reports, or was read
	}
	return nil
}

// deviceGrace is the time after a detach for which a device may still answer reads.
const deviceGrace = 2 * time.Second

// readUntilGone reads uncached blocks of a device until a read fails. It returns the time from
// began to the last read that succeeded. gone is false if all blocks up to size could be read: the
// device may have been readable for longer. A removed device may have the size 0, so EOF is a
// failed read.
func readUntilGone(device io.ReaderAt, size int64, began time.Time) (last time.Duration,
	gone bool) {
	block, pace := make([]byte, 512), time.NewTicker(2*time.Millisecond)
	defer pace.Stop()
	for place := int64(0); place < size; place += harness.MiB / 4 {
		if _, err := device.ReadAt(block, place); err != nil {
			return last, true
		}
		last = time.Since(began)
		<-pace.C
	}
	return last, false
}

// onlyToStopped checks that the rack attaches the disk to a stopped instance, and then refuses
// again to attach it to this running one. A rack that refuses only sometimes has hot-plug.
func (w *job) onlyToStopped(ctx context.Context, disk, stopped, running string,
	refused error) error {
	if err := w.attach(ctx, disk, stopped); err != nil {
		return errAttach{fmt.Errorf("attach: the rack does not attach a disk to this running "+
			"instance, and not to a stopped one either: %s", rules.Brief(err))}
	}
	if err := w.detach(ctx, disk, stopped); err != nil {
		return briefly("detach the disk of the trial from a stopped instance", err)
	}
	again := w.attach(ctx, disk, running)
	switch {
	case again == nil:
		return errAttach{fmt.Errorf("attach: the rack attached a disk to this running instance only "+
			"when it was asked again; at first: %s", rules.Brief(refused))}
	case !rules.SaysNotStopped(again):
		return errAttach{fmt.Errorf("attach: expected that the rack refuses again because this "+
			"instance is not stopped; found %s", rules.Brief(again))}
	}
	return nil
}

func (w *job) attach(ctx context.Context, disk, instance string) error {
	_, err := w.client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func (w *job) look(ctx context.Context, disk string) (*oxide.Disk, error) {
	return w.client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk)})
}

// createDisk creates a blank disk of 1 GiB through the rack's API, without the driver, and checks
// that the answer contains the mark. The disk's name contains the run's ID.
func (w *job) createDisk(ctx context.Context, what string, m mark) (*oxide.Disk, error) {
	disk, err := w.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: w.projectName,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + w.id + "-" + what),
			Description: m.description(), Size: oxide.ByteCount(harness.GiB),
			DiskBackend: harness.BlankBackend()}})
	if errors.Is(err, oxide.ErrObjectAlreadyExists) {
		// A request without an answer may have created the disk.
		disk, err = w.client.DiskView(ctx, oxide.DiskViewParams{Project: w.projectName,
			Disk: oxide.NameOrId("conf-" + w.id + "-" + what)})
	}
	if err == nil && disk.Description != m.description() {
		err = fmt.Errorf("expected the description %q; found %q: nobody could find what the run makes, "+
			"so it makes nothing more; the disk %s is left if it was the run's", m.description(),
			disk.Description, disk.Name)
	}
	return disk, briefly("create a disk", err)
}

// briefly returns an error that names the failed step and contains the rack's refusal on one line.
func briefly(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", step, rules.Brief(err))
}
