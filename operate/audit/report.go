package audit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

type report struct {
	Cluster    string    `json:"cluster"`
	Project    string    `json:"project"`
	ListedAt   time.Time `json:"listedAt"`
	Owned      int       `json:"owned"`
	Wanted     int       `json:"wanted"`
	Deleted    int       `json:"deleted"`
	TooYoung   int       `json:"tooYoung"`
	Orphans    []*object `json:"orphans"`
	Missing    []finding `json:"missing"`
	Static     []*object `json:"static"` // wanted objects that another cluster or person made
	Kept       []finding `json:"kept"`
	Notes      []string  `json:"notes,omitempty"`
	noDeletion string    // why nothing may be deleted by this list, or ""
}

// finding is the entry for a missing object, or for a named object that was not deleted.
type finding struct {
	Kind     Kind   `json:"kind"`
	ID       string `json:"id"`
	WantedBy string `json:"wantedBy,omitempty"`
	Reason   string `json:"reason,omitempty"`
}

func (r *report) found() bool {
	return len(r.Missing)+len(r.Kept) > 0 ||
		slices.ContainsFunc(r.Orphans, func(o *object) bool { return !o.Deleted })
}

func (r *report) addNotes(noDeletion string) {
	if r.noDeletion = noDeletion; noDeletion != "" && len(r.Orphans) > 0 {
		r.Notes = append(r.Notes, "--delete would delete nothing: "+noDeletion)
	}
	if r.TooYoung > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d are too young to judge: they were made less than "+
			"--min-age before the list of wanted volumes, or after it; a later audit judges them",
			r.TooYoung))
	}
	if slices.ContainsFunc(r.Orphans, func(o *object) bool { return o.Kind == kindSnapshot }) {
		r.Notes = append(r.Notes, "a snapshot that nothing in the cluster names may be a backup's: "+
			"Velero, for example, keeps its id in the backup; look there before you delete it")
	}
}

// write writes the report to out, and then a line FIGURE with numbers. JSON and YAML must stay
// valid, so with these formats that line goes to the log.
func (r *report) write(output string, out, log io.Writer) error {
	var err error
	figureTo := log
	switch output {
	case "json":
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(r)
	case "pv":
		for _, note := range r.Notes {
			_, _ = fmt.Fprintf(log, "NOTE: %s\n", csierr.Plain(note))
		}
		err = r.writeManifests(out)
	default:
		figureTo, err = out, r.writeTables(out)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	_, err = fmt.Fprintf(figureTo, "FIGURE audit owned=%d wanted=%d orphans=%d missing=%d deleted=%d "+
		"too_young=%d\n", r.Owned, r.Wanted, len(r.Orphans), len(r.Missing), r.Deleted, r.TooYoung)
	return err
}

func (r *report) writeTables(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	writeTable(w, "ORPHANS: made for this cluster, not wanted", "KIND, ID, NAME, CSI NAME, CLAIM, "+
		"SIZE, CREATED, STATE, ATTACHED TO, DELETED, NOT OURS BECAUSE", r.Orphans, func(o *object) []any {
		return []any{o.Kind, o.ID, o.Name, o.CSIName, o.Claim, fmt.Sprintf("%.4g GiB",
			float64(o.SizeBytes)/volume.GiB), o.Created.UTC().Format(time.DateTime), o.State,
			o.AttachedTo, o.Deleted, o.Foreign}
	})
	writeTable(w, "KEPT: named for deletion, not deleted", "KIND, ID, BECAUSE", r.Kept,
		func(f finding) []any { return []any{f.Kind, f.ID, f.Reason} })
	writeTable(w, "MISSING: wanted, not on the rack", "KIND, ID, WANTED BY", r.Missing,
		func(f finding) []any { return []any{f.Kind, f.ID, f.WantedBy} })
	writeTable(w, "STATIC: wanted, not made by this cluster's driver, which never deletes them",
		"KIND, ID, NAME, WANTED BY, NOT OURS BECAUSE", r.Static,
		func(s *object) []any { return []any{s.Kind, s.ID, s.Name, s.WantedBy, s.Foreign} })
	for _, note := range r.Notes {
		_, _ = fmt.Fprintf(w, "NOTE: %s\n\n", csierr.Plain(note))
	}
	return w.Flush()
}

func writeTable[R any](w io.Writer, title, header string, rows []R, cells func(R) []any) {
	if len(rows) == 0 {
		return
	}
	_, _ = fmt.Fprintln(w, title+"\n"+strings.ReplaceAll(header, ", ", "\t"))
	for _, row := range rows {
		for _, cell := range cells(row) {
			_, _ = fmt.Fprint(w, cmp.Or(csierr.Plain(fmt.Sprint(cell)), "-"), "\t")
		}
		_, _ = fmt.Fprintln(w)
	}
	_, _ = fmt.Fprintln(w)
}

// manifests is a template that describes orphans as objects of Kubernetes, so that a cluster can
// use them again. Comments mark the fields that the rack does not know and a person has to check.
var manifests = template.Must(template.New("").Funcs(template.FuncMap{"quote": quote}).Parse(
	`{{range .}}---
{{if eq .Kind "disk"}}apiVersion: v1
kind: PersistentVolume
metadata: {name: {{quote .ObjectName}}} # {{.Seen}}
spec:
  capacity: {storage: {{quote .Size}}}
  accessModes: [ReadWriteOnce] # as the claim's, or ReadWriteOncePod
  persistentVolumeReclaimPolicy: Retain # Delete, when all is well and its claim shall delete it
  storageClassName: oxide-disk # as the claim's
  claimRef: {namespace: {{quote .Namespace}}, name: {{quote .ClaimName}}} # {{.Because}}
  {{- if eq .Use "block"}}
  volumeMode: Block
  {{- end}}
  csi:
    driver: {{.Driver}}
    volumeHandle: {{.ID}}
    {{- if ne .Use "block"}}
    fsType: ext4 # what the disk holds; if another, the pod's events name it
    {{- end}}
{{else}}apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: {{quote .ObjectName}}} # {{.Seen}}
spec:
  deletionPolicy: Retain
  driver: {{.Driver}}
  source: {snapshotHandle: {{.ID}}}
  volumeSnapshotRef: {namespace: {{quote .Namespace}}, name: {{quote .ClaimName}}}
{{end}}{{end}}`))

func quote(s string) (string, error) {
	text, err := json.Marshal(s)
	return string(text), err
}

// manifest is the template's data for one orphan. Because is the comment at the field claimRef.
type manifest struct {
	*object
	Driver, ObjectName, Size, Seen, Namespace, ClaimName, Because string
}

// ofAChange matches the end of the name of a claim that "claim grow" or "claim revert" creates.
var ofAChange = regexp.MustCompile(`-(grow|revert)-[0-9a-f]{8}$`)

// writeManifests writes the orphans as manifests. Each object gets the CSI name as its name, and is
// reserved for the claim for which the disk was made. If the claim is unknown, or if several disks
// were made for it, the object is reserved for a claim that does not exist, so that Kubernetes does
// not bind the object to a wrong claim.
func (r *report) writeManifests(out io.Writer) error {
	var all []manifest
	of := map[string]int{}
	for _, o := range r.Orphans {
		if o.Foreign != "" || o.halfDeleted {
			continue
		}
		m := manifest{object: o, Driver: volume.DriverName, ObjectName: o.CSIName,
			Size: fmt.Sprint(o.SizeBytes), Because: "for which it was made"}
		m.Seen = strings.TrimSpace(fmt.Sprintf("made %s, %s %s", o.Created.UTC().Format(time.DateTime),
			csierr.Plain(o.State), o.AttachedTo))
		if !kube.IsName(o.CSIName) {
			m.ObjectName = "oxide-" + o.ID
		}
		m.Namespace, m.ClaimName, _ = strings.Cut(ofAChange.ReplaceAllString(o.Claim, ""), "/")
		all = append(all, m)
		of[string(o.Kind)+m.Namespace+"/"+m.ClaimName]++
	}
	for i, m := range all {
		switch {
		case !kube.IsName(m.Namespace) || !kube.IsName(m.ClaimName):
			m.Because = "unknown"
		case of[string(m.Kind)+m.Namespace+"/"+m.ClaimName] > 1:
			m.Because = "one of several made for " + m.Namespace + "/" + m.ClaimName + "; choose"
		default:
			continue
		}
		m.Namespace, m.ClaimName = "default", m.ObjectName
		all[i] = m
	}
	return manifests.Execute(out, all)
}

// If the list of wanted volumes is older than maxListAge, deleteNamed reads the list again.
const maxListAge = rack.Look(5 * time.Second)

// deleteNamed deletes the orphans that a person has named, and stops at the first failure. It
// records all results in c.report.
func (a *audit) deleteNamed(ctx context.Context, c *comparison) error {
	r := c.report
	named, err := readNamed(a.options.Delete, r)
	if err != nil {
		return fmt.Errorf("--delete: nothing was deleted: %w", err)
	}
	for _, n := range named {
		if rack.Looking()-c.wanted.readAt > maxListAge {
			if c, err = a.compare(ctx); err != nil {
				return err
			}
		}
		if c.report.noDeletion != "" {
			return fmt.Errorf("--delete: %d of %d were deleted: %s", r.Deleted, len(named),
				c.report.noDeletion)
		}
		reason := c.keeps(n)
		if reason == "" {
			if reason, err = a.remove(ctx, n); err != nil {
				return err
			}
		}
		switch reason {
		case "":
			for _, o := range r.Orphans {
				o.Deleted = o.Deleted || o.ID == n.ID
			}
			r.Deleted++
			_, _ = fmt.Fprintf(a.log, "deleted the %s %s (%s)\n", n.Kind, n.ID, n.Name)
		case notThere: // deleted before, perhaps by an interrupted audit
		default:
			r.Kept = append(r.Kept, finding{Kind: n.Kind, ID: n.ID, Reason: reason})
		}
	}
	return nil
}

func readNamed(path string, now *report) ([]object, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r struct {
		Cluster, Project string
		Orphans          []object
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("it is not a report of audit --output json: %w", err)
	}
	switch {
	case r.Cluster != now.Cluster || r.Project != now.Project:
		return nil, fmt.Errorf("it is a report of the cluster %q in the project %q, and this audit is "+
			"of %q in %q", r.Cluster, r.Project, now.Cluster, now.Project)
	case len(r.Orphans) == 0:
		return nil, errors.New("it has no orphans: leave those in it that are to be deleted")
	}
	return r.Orphans, nil
}

func (c *comparison) keeps(named object) string {
	o, there := c.now[named.ID]
	switch {
	case !there:
		return notThere
	case !o.owned:
		return "it " + o.Foreign
	case !o.same(named):
		return changed
	}
	return c.judge(o)
}

const (
	changed  = "it is not the same any more as in the report"
	notThere = "the rack does not have it"
)

// remove deletes an orphan on the rack, or returns the reason why not. No other function of the
// package deletes an object. Right before the request, the rack has to show that the object is
// unchanged, belongs to this cluster, and is not in use.
func (a *audit) remove(ctx context.Context, named object) (reason string, err error) {
	id := oxide.NameOrId(named.ID)
	if named.Name == "deleted-"+named.ID {
		// The rack has deleted the disk only in part. Its state then names no instance, so ask all
		// instances. Nobody can attach such a disk meanwhile.
		if holders, err := a.Holders(ctx, named.ID); err != nil || len(holders) > 0 {
			return "it is attached to the instance " + strings.Join(holders, ", "), err
		}
	}
	look := rack.Looking()
	now, err := a.read(ctx, named.Kind, id)
	switch {
	case err != nil:
		return "", err
	case now == nil:
		return notThere, nil
	case now.Foreign != "":
		return "it " + now.Foreign, nil
	case !now.same(named):
		return changed, nil
	case !now.free():
		return "it is " + strings.TrimSpace(now.State+" "+now.AttachedTo), nil
	}
	doing := "delete the " + string(named.Kind) + " " + named.ID
	open, err := a.Request(ctx, doing, look, func(ctx context.Context) error {
		if named.Kind == kindDisk {
			return a.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
		}
		return a.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
	})
	switch {
	case err == nil:
		return "", nil
	case open:
		return "", fmt.Errorf("%w; the rack may still delete it: repeat the audit in a minute", err)
	case rack.NotFound(err):
		if now, err := a.read(ctx, named.Kind, id); now != nil || err != nil {
			return "the rack shows it, but does not find it for deletion", err
		}
		return notThere, nil
	case rack.Refused(err):
		return "the rack refuses: " + csierr.Message(rack.Error(ctx, "delete", err)), nil
	}
	return "", rack.Error(ctx, doing, err)
}

// Kind is the kind of an object of the rack.
type Kind string

// A handle has the kind "either" if the audit does not know whether it names a disk or a snapshot.
const (
	kindDisk     Kind = "disk"
	kindSnapshot Kind = "snapshot"
	either       Kind = "disk or snapshot"
)

type object struct {
	Kind       Kind      `json:"kind"`
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	CSIName    string    `json:"csiName,omitempty"`
	Claim      string    `json:"claim,omitempty"` // the claim for which it was made
	SizeBytes  int64     `json:"sizeBytes"`
	Created    time.Time `json:"created,omitzero"`
	State      string    `json:"state"`
	AttachedTo string    `json:"attachedTo,omitempty"`
	// Foreign is why the object does not belong to this cluster, or how it contradicts its ownership
	// tag. For an object of this cluster it is empty.
	Foreign string `json:"foreign,omitempty"`

	Deleted  bool   `json:"deleted,omitempty"`
	WantedBy string `json:"wantedBy,omitempty"`

	// Use tells whether the driver made the disk for a filesystem or for raw block; see volume.Tag.
	Use string `json:"-"`

	owned       bool // it has this cluster's ownership tag
	halfDeleted bool
}

func (o object) same(as object) bool {
	return o.Kind == as.Kind && o.ID == as.ID && o.Name == as.Name && o.CSIName == as.CSIName &&
		o.SizeBytes == as.SizeBytes && o.Created.Equal(as.Created)
}

func (o object) free() bool {
	if o.Kind == kindDisk {
		return o.State == string(oxide.DiskStateStateDetached) || o.halfDeleted
	}
	return o.State == string(oxide.SnapshotStateReady) || o.State == string(oxide.SnapshotStateFaulted)
}

// inventory contains the project's objects. The keys are their ids.
type inventory map[string]object

func (s inventory) owns(h handle) bool { return s[h.ID].owned && h.mayBe(s[h.ID].Kind) }

func (a *audit) list(ctx context.Context) (inventory, error) {
	s := inventory{}
	err := a.EachDisk(ctx, &rack.Pager{}, func(d *oxide.Disk) (enough bool, err error) {
		s[d.Id] = *a.diskObject(d)
		return false, rack.ValidateDisk("list disks", d)
	})
	if err != nil {
		return nil, err
	}
	return s, a.EachSnapshot(ctx, &rack.Pager{}, func(o *oxide.Snapshot) (enough bool, err error) {
		s[o.Id] = *a.snapshotObject(o)
		return false, rack.ValidateSnapshot("list snapshots", o)
	})
}

func (a *audit) diskObject(d *oxide.Disk) *object {
	m, ok := volume.ParseTag(d.Description)
	return &object{Kind: kindDisk, ID: d.Id, Name: string(d.Name), CSIName: m.Name, Claim: m.Claim,
		SizeBytes: int64(d.Size), Created: *cmp.Or(d.TimeCreated, &time.Time{}),
		State: string(d.State.State()), AttachedTo: rack.InstanceOf(d), Use: m.Use,
		Foreign: rack.ForeignDisk(d, a.clusterID), owned: ok && m.Cluster == a.clusterID,
		halfDeleted: rack.HalfDeleted(d)}
}

func (a *audit) snapshotObject(s *oxide.Snapshot) *object {
	m, ok := volume.ParseTag(s.Description)
	return &object{Kind: kindSnapshot, ID: s.Id, Name: string(s.Name), CSIName: m.Name, Claim: m.Claim,
		SizeBytes: int64(s.Size), Created: *cmp.Or(s.TimeCreated, &time.Time{}), State: string(s.State),
		Foreign: rack.ForeignSnapshot(s, a.clusterID), owned: ok && m.Cluster == a.clusterID}
}

// find returns the object of a handle from the inventory, else from the rack, else nil.
func (a *audit) find(ctx context.Context, h handle, s inventory) (*object, error) {
	if o, ok := s[h.ID]; ok && h.mayBe(o.Kind) {
		return &o, nil
	}
	for _, kind := range []Kind{kindDisk, kindSnapshot} {
		if id, ok := rack.ID(h.ID); ok && h.mayBe(kind) {
			if o, err := a.read(ctx, kind, id); o != nil || err != nil {
				return o, err
			}
		}
	}
	return nil, nil
}

// read reads an object from the rack, or returns nil if the rack has no such object.
func (a *audit) read(ctx context.Context, kind Kind, id oxide.NameOrId) (*object, error) {
	if kind == kindDisk {
		return readAs(ctx, kind, id, a.Disk, a.DiskGone, a.diskObject)
	}
	return readAs(ctx, kind, id, a.Snapshot, a.SnapshotGone, a.snapshotObject)
}

func readAs[O any](ctx context.Context, kind Kind, id oxide.NameOrId,
	view func(context.Context, oxide.NameOrId) (*O, error),
	gone func(context.Context, oxide.NameOrId) error, as func(*O) *object) (*object, error) {
	found, err := view(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return nil, gone(ctx, id)
	case csierr.Has(err, csierr.OtherProject):
		return &object{Kind: kind, ID: string(id), Foreign: "is in another project"}, nil
	case err != nil:
		return nil, err
	}
	return as(found), nil
}

func (s inventory) sorted() []object {
	return slices.SortedFunc(maps.Values(s), func(a, b object) int {
		return strings.Compare(string(a.Kind)+a.Name+a.ID, string(b.Kind)+b.Name+b.ID)
	})
}
