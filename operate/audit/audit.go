// Package audit finds orphans: disks and snapshots of the driver that no cluster object names,
// because a create's answer was lost and it was not repeated, or a volume was deleted without the
// driver. It deletes an orphan only if a person names it and another check confirms it.
package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// Options are the options of an audit.
type Options struct {
	Volumes string // a file with the wanted volumes, "-" for standard input
	Kubectl bool   // get the wanted volumes from kubectl instead

	// MinAge is how old a disk or snapshot must be to count as an orphan. A younger one may be missing
	// in the list of wanted volumes: the orchestrator needs a while to record a volume, and the clocks
	// of the rack and of the list may differ.
	MinAge time.Duration

	Delete string // a file with the orphans to delete; empty deletes nothing
	Output string // table, json or pv
}

// defaultMinAge is how long an orchestrator may take to record a volume that has just been made.
const defaultMinAge = 10 * time.Minute

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Volumes, "volumes", "", "`FILE` with the wanted volumes: one volume or "+
		"snapshot handle per line, or the output of kubectl get -o json; - is standard input")
	flags.BoolVar(&o.Kubectl, "kubectl", false, "read the wanted volumes from kubectl's current "+
		"cluster")
	flags.DurationVar(&o.MinAge, "min-age", defaultMinAge, "minimum `AGE` of an object to judge, "+
		"when the list was made: a younger one may not be in it yet")
	o.Output = "table"
	flags.Func("output", "`FORMAT` of the report: table (the default), json, or pv: manifests with "+
		"which a cluster has the orphans again",
		func(value string) error {
			o.Output = value
			if !slices.Contains([]string{"table", "json", "pv"}, value) {
				return errors.New("has to be table, json or pv")
			}
			return nil
		})
	flags.StringVar(&o.Delete, "delete", "", "delete the orphans in `FILE`: a report of --output "+
		"json in which you left only those; needs --kubectl and OXIDE_CLUSTER_ID")
}

// Check returns an error if options are missing or contradict each other.
func (o *Options) Check(clusterID string) error {
	switch {
	case o.Kubectl == (o.Volumes != ""):
		return errors.New("audit: set exactly one of --volumes FILE and --kubectl, which name the " +
			"wanted volumes")
	case o.MinAge < 0:
		return errors.New("audit: --min-age must not be negative")
	case o.Delete != "" && !o.Kubectl:
		return errors.New("audit: --delete needs --kubectl: only the exit status of kubectl shows that " +
			"the list is complete; without Kubernetes delete by hand (oxide disk delete)")
	case o.Delete != "" && o.Output == "pv":
		return errors.New("audit: --output pv is for orphans that are kept: omit --delete")
	case o.Delete != "" && clusterID == "":
		// Two clusters without an id have equal tags, so each reports the other's disks as orphans.
		return errors.New("OXIDE_CLUSTER_ID (--cluster-id) is not set: --delete needs it to " +
			"distinguish this cluster's disks from another's")
	}
	return nil
}

// Run compares the disks and snapshots of a cluster on the rack with the wanted ones, and writes a
// report to out. It deletes the orphans that the options name, and logs each deletion at once.
// found is true if orphans are left, wanted objects are missing, or an object in o.Delete was kept.
func Run(ctx context.Context, client *rack.Client, clusterID string, o Options, out,
	log io.Writer) (found bool, err error) {
	a := &audit{Client: client, clusterID: clusterID, options: o, log: log}
	c, err := a.compare(ctx)
	if err != nil {
		return false, plainError(err)
	}
	if o.Delete != "" {
		err = plainError(a.deleteNamed(ctx, c))
	}
	// Report the deletions even if a later one failed.
	return c.report.found(), errors.Join(err, c.report.write(o.Output, out, log))
}

func plainError(err error) error {
	if s, ok := status.FromError(err); ok && err != nil {
		return errors.New(s.Message())
	}
	return err
}

type audit struct {
	*rack.Client
	clusterID string
	options   Options
	log       io.Writer
}

type comparison struct {
	before, now inventory // before and after the list was read
	wanted      *wanted
	minAge      time.Duration
	report      *report
}

// compare lists the rack's objects, reads the wanted volumes, and lists the rack's objects again.
// Only an object in both lists can be an orphan. An incomplete list is an error.
func (a *audit) compare(ctx context.Context) (*comparison, error) {
	world, err := a.World(ctx)
	if err != nil {
		return nil, err
	}
	c := comparison{minAge: a.options.MinAge}
	if c.before, err = a.list(ctx); err != nil {
		return nil, err
	}
	if c.wanted, err = a.options.read(ctx); err != nil {
		return nil, err
	}
	if c.now, err = a.list(ctx); err != nil {
		return nil, err
	}
	c.report = &report{
		Cluster: a.clusterID, Project: world.Project, ListedAt: c.wanted.listedAt.UTC(),
		Wanted:  len(c.wanted.handles),
		Orphans: []*object{}, Missing: []finding{}, Static: []*object{}, Kept: []finding{},
	}
	if err := a.findMissing(ctx, &c); err != nil {
		return nil, err
	}
	for _, o := range c.now.sorted() {
		if !o.owned {
			continue
		}
		c.report.Owned++
		switch c.judge(o) {
		case isOrphan:
			c.report.Orphans = append(c.report.Orphans, &o)
		case isYoung:
			c.report.TooYoung++
		}
	}
	c.report.addNotes(c.noDeletion())
	return &c, nil
}

// findMissing reports each wanted object that the driver did not make for this cluster: as static
// if it exists, otherwise as missing. An object that was deleted during the audit is neither.
func (a *audit) findMissing(ctx context.Context, c *comparison) error {
	for _, h := range c.wanted.handles {
		if c.before.owns(h) || c.now.owns(h) {
			continue
		}
		other, err := a.find(ctx, h, c.now)
		switch {
		case err != nil:
			return err
		case other == nil:
			c.report.Missing = append(c.report.Missing, finding{Kind: h.Kind, ID: h.ID, WantedBy: h.By})
		case other.Foreign != "":
			other.WantedBy = h.By
			c.report.Static = append(c.report.Static, other)
		}
	}
	return nil
}

// Results of judge(). Any other result tells which object of the list names the disk or snapshot.
const (
	isOrphan = ""
	isYoung  = "it was younger than --min-age when the list was made, or its age is unknown"
)

// judge returns isOrphan, or why an object of this cluster is not an orphan. An object that was
// made shortly before or during the read of the list is young, because the list may lack it.
func (c *comparison) judge(o object) string {
	_, was := c.before[o.ID]
	by, named := c.wanted.names(o)
	switch {
	case named:
		return "it is named by the " + by
	case !was, o.Created.IsZero(), o.Created.After(c.wanted.listedAt.Add(-c.minAge)):
		return isYoung
	}
	return isOrphan
}

// noDeletion returns why nothing may be deleted, or "". An old list, or a list of another cluster,
// lacks volumes that are in use, and the audit then reports their disks as orphans.
func (c *comparison) noDeletion() string {
	if missing := c.report.Missing; len(missing) > 0 {
		return fmt.Sprintf("the list names %d disks or snapshots that the rack does not have, such as "+
			"the %s %.80q of the %s: it may be of another time, as after a restore of etcd, and then what "+
			"looks like an orphan may hold data; if they are gone for good, delete the objects that name "+
			"them, and repeat the command", len(missing), missing[0].Kind, missing[0].ID,
			missing[0].WantedBy)
	}
	for _, h := range c.wanted.handles {
		// Another cluster's PersistentVolume may have this ID, but not under the name in o.CSIName.
		if o := c.now[h.ID]; o.owned && h.volume == o.CSIName {
			return ""
		}
	}
	return fmt.Sprintf("for no PersistentVolume in the list has the driver made a disk of the "+
		"cluster %q, so it may be the list of another cluster; check kubectl's current context; if the "+
		"cluster has no volume left, delete by hand (oxide disk delete, oxide snapshot delete)",
		c.report.Cluster)
}

// handle is the id of a wanted volume or snapshot, with the object that contains it.
type handle struct {
	Kind   Kind
	ID     string
	By     string // the object, such as "PersistentVolume pv-1" or "line 3"
	volume string // the name of the PersistentVolume
}

func (h handle) mayBe(kind Kind) bool { return h.Kind == kind || h.Kind == either }

type wanted struct {
	handles  []handle
	listedAt time.Time // the list was made at this time or earlier
	readAt   rack.Look // when the audit had read the list

	// named maps each UUID and each name of the form csi-… in the list to the object that contains it,
	// such as "PersistentVolume pv-1".
	named map[string]string
	texts [][2]string // for each object of the list: its kind and name, and its JSON
}

// add records the names in an object of the list. It searches all fields and annotations: while a
// claim changes its disk, or a volume moves, only an annotation names the disk.
func (w *wanted) add(by, text string) {
	text = strings.ToLower(text)
	for _, name := range namesIn(text) {
		if w.named[name] == "" {
			w.named[name] = by
		}
	}
	w.texts = append(w.texts, [2]string{by, text})
}

func namesIn(text string) (names []string) {
	const uuidBytes, dash = 36, 8
	for i := range text {
		if end := i + volume.SerialBytes; end <= len(text) && volume.IsOwnName(text[i:end]) {
			names = append(names, text[i:end])
		}
		if end := i + uuidBytes; end <= len(text) && text[i+dash] == '-' && volume.IsID(text[i:end]) {
			names = append(names, text[i:end])
		}
	}
	return names
}

// names() returns the object of the list that names o: by id, by name, by CSI name, or by the UUID
// in the CSI name. This UUID is the UID of the claim or VolumeSnapshot for which the driver made o.
// Kubernetes may not have recorded the id of o there yet.
func (w *wanted) names(o object) (by string, ok bool) {
	csiName := strings.ToLower(o.CSIName)
	for _, name := range namesIn(o.ID + " " + o.Name + " " + csiName) {
		if by, ok := w.named[name]; ok {
			return by, true
		}
	}
	for _, t := range w.texts {
		if strings.Contains(t[1], csiName) {
			return t[0], true
		}
	}
	return "", false
}

func (w *wanted) addHandle(kind Kind, id, by, pv string) {
	if canonical, ok := volume.ParseID(id); ok {
		id = canonical
	}
	w.handles = append(w.handles, handle{kind, id, by, pv})
}

// read reads the list of wanted volumes. The exit status of kubectl shows that its list is
// complete. A list from a file or a pipe may be truncated without an error.
func (o *Options) read(ctx context.Context) (*wanted, error) {
	at := time.Now()
	if o.Kubectl {
		data, err := kubectlList(ctx)
		if err != nil {
			return nil, err
		}
		return parseWanted("the output of kubectl", data, at)
	}
	file := os.Stdin
	if o.Volumes != "-" {
		var err error
		if file, err = os.Open(o.Volumes); err != nil {
			return nil, fmt.Errorf("--volumes: %w", err)
		}
		defer func() { _ = file.Close() }()
	}
	// A list does not contain its time. For a file, use the time of its last write. For a pipe, use
	// the time when the audit began.
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() && info.ModTime().Before(at) {
		at = info.ModTime()
	}
	data, readErr := io.ReadAll(file)
	if err := errors.Join(err, readErr); err != nil {
		return nil, fmt.Errorf("--volumes: %w", err)
	}
	return parseWanted("--volumes:", data, at)
}

// parseWanted parses handles, one per line, or Kubernetes' JSON.
func parseWanted(from string, data []byte, at time.Time) (*wanted, error) {
	w := &wanted{listedAt: at, readAt: rack.Looking(), named: map[string]string{}}
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		if err := w.addKubernetes(data); err != nil {
			return nil, fmt.Errorf("%s %w", from, err)
		}
		return w, nil
	}
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		by := fmt.Sprintf("line %d", i+1)
		if _, ok := volume.ParseID(line); !ok {
			return nil, fmt.Errorf("%s %s is not a volume handle of this driver (a UUID), and the list is "+
				"not JSON: %.40q", from, by, line)
		}
		w.add(by, line)
		w.addHandle(either, line, by, "")
	}
	return w, nil
}

func (w *wanted) addKubernetes(data []byte) error {
	objects, err := kube.Parse(data)
	if err != nil {
		return err
	}
	var list struct{ Items []json.RawMessage }
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	if list.Items == nil { // a single object, and not a list
		list.Items = []json.RawMessage{data}
	}
	for i, o := range objects {
		by := strings.TrimSpace(o.Kind + " " + path.Join(o.Metadata.Namespace, o.Metadata.Name))
		w.add(by, string(list.Items[i]))
		switch handle := o.Spec.CSI.VolumeHandle; {
		case o.Kind == "Status":
			return errors.New("is an error of Kubernetes and no list")
		case o.Kind == "PersistentVolume" && o.Spec.CSI.Driver == volume.DriverName && handle == "":
			return fmt.Errorf("has the %s without a volumeHandle", by)
		case o.Kind == "PersistentVolume" && o.Spec.CSI.Driver == volume.DriverName:
			w.addHandle(kindDisk, handle, by, o.Metadata.Name)
		case o.Kind == "VolumeSnapshotContent" && o.Spec.Driver == volume.DriverName:
			if id := cmp.Or(o.Status.SnapshotHandle, o.Spec.Source.SnapshotHandle); id != "" {
				w.addHandle(kindSnapshot, id, by, "")
			}
		}
	}
	return nil
}

// kubectlList returns all objects in kubectl's current cluster that may name disks or snapshots. A
// CSIDriver names a disk in an annotation while the node keeper moves the volume.
func kubectlList(ctx context.Context) ([]byte, error) {
	kinds := "persistentvolumes,persistentvolumeclaims,volumeattachments,csidrivers,nodes"
	crds, err := kube.Kubectl(ctx, "get", "customresourcedefinitions", "--output=name")
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(string(crds)) {
		// Some clusters lack the CRDs of snapshots, whose API groups end with this suffix.
		if _, crd, _ := strings.Cut(name, "/"); strings.HasSuffix(crd, "snapshot.storage.k8s.io") {
			kinds += "," + crd
		}
	}
	return kube.Kubectl(ctx, "get", kinds, "--all-namespaces", "--output=json")
}
