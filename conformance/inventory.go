package conformance

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

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
	// instance in which it runs. Helper is the one that it starts and stops.
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

// withMark puts mark before the name of every volume and snapshot in a request to create one.
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
