package audit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type report struct {
	Cluster    string    `json:"cluster"`
	Project    string    `json:"project"`
	ListedAt   time.Time `json:"listedAt"`
	Owned      int       `json:"owned"`
	Wanted     int       `json:"wanted"`
	Deleted    int       `json:"deleted"`
	TooYoung   int       `json:"tooYoung"`
	Orphans    []*listed `json:"orphans"`
	Missing    []finding `json:"missing"`
	Static     []*listed `json:"static"`
	Kept       []finding `json:"kept"`
	Notes      []string  `json:"notes,omitempty"`
	noDeletion string    // why nothing may be deleted by this list, or ""
}

// listed is an orphan, or a wanted object that this cluster's driver did not make.
type listed struct {
	object

	Deleted  bool   `json:"deleted,omitempty"`
	WantedBy string `json:"wantedBy,omitempty"`
}

// finding is an object that is missing, or that a person named and that was not deleted.
type finding struct {
	Kind     Kind   `json:"kind"`
	ID       string `json:"id"`
	WantedBy string `json:"wantedBy,omitempty"`
	Reason   string `json:"reason,omitempty"`
}

// found reports whether orphans are left, wanted objects are missing, or a named object was kept.
func (r *report) found() bool {
	return len(r.Missing)+len(r.Kept) > 0 ||
		slices.ContainsFunc(r.Orphans, func(o *listed) bool { return !o.Deleted })
}

// addNotes notes what a person has to know before a deletion.
func (r *report) addNotes(noDeletion string) {
	if r.noDeletion = noDeletion; noDeletion != "" && len(r.Orphans) > 0 {
		r.Notes = append(r.Notes, "--delete would delete nothing: "+noDeletion)
	}
	if r.TooYoung > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d are too young to judge: they were made less than "+
			"--min-age before the list of wanted volumes, or after it; a later audit judges them",
			r.TooYoung))
	}
	if slices.ContainsFunc(r.Orphans, func(o *listed) bool { return o.Kind == kindSnapshot }) {
		r.Notes = append(r.Notes, "a snapshot that nothing in the cluster names may be a backup's: "+
			"Velero, for example, keeps its id in the backup; look there before you delete it")
	}
}

// write writes the report, and then its line with figures: to out below the tables, and otherwise
// to log, so that out is valid JSON or YAML.
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
	_, err = fmt.Fprintf(figureTo, "FIGURE audit owned=%d wanted=%d orphans=%d missing=%d "+
		"deleted=%d too_young=%d\n",
		r.Owned, r.Wanted, len(r.Orphans), len(r.Missing), r.Deleted, r.TooYoung)
	return err
}

func (r *report) writeTables(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	table := func(title, header string, rows int, row func(i int) []any) {
		if rows == 0 {
			return
		}
		_, _ = fmt.Fprintln(w, title+"\n"+strings.ReplaceAll(header, ", ", "\t"))
		for i := range rows {
			for _, cell := range row(i) {
				_, _ = fmt.Fprint(w, cmp.Or(csierr.Plain(fmt.Sprint(cell)), "-"), "\t")
			}
			_, _ = fmt.Fprintln(w)
		}
		_, _ = fmt.Fprintln(w)
	}
	table("ORPHANS: made for this cluster, not wanted", "KIND, ID, NAME, CSI NAME, CLAIM, SIZE, "+
		"CREATED, STATE, ATTACHED TO, DELETED, NOT OURS BECAUSE", len(r.Orphans), func(i int) []any {
		o := r.Orphans[i]
		return []any{o.Kind, o.ID, o.Name, o.CSIName, o.Claim, fmt.Sprintf("%.4g GiB",
			float64(o.SizeBytes)/volume.GiB), o.Created.UTC().Format(time.DateTime), o.State,
			o.AttachedTo, o.Deleted, o.Foreign}
	})
	table("KEPT: named for deletion, not deleted", "KIND, ID, BECAUSE", len(r.Kept),
		func(i int) []any { return []any{r.Kept[i].Kind, r.Kept[i].ID, r.Kept[i].Reason} })
	table("MISSING: wanted, not on the rack", "KIND, ID, WANTED BY", len(r.Missing),
		func(i int) []any { return []any{r.Missing[i].Kind, r.Missing[i].ID, r.Missing[i].WantedBy} })
	table("STATIC: wanted, not made by this cluster's driver, which never deletes them",
		"KIND, ID, NAME, WANTED BY, NOT OURS BECAUSE", len(r.Static), func(i int) []any {
			s := r.Static[i]
			return []any{s.Kind, s.ID, s.Name, s.WantedBy, s.Foreign}
		})
	for _, note := range r.Notes {
		_, _ = fmt.Fprintf(w, "NOTE: %s\n\n", csierr.Plain(note))
	}
	return w.Flush()
}

// manifests describes orphans as objects that a cluster can use again. Comments mark the fields
// that the rack does not know, which a person has to check.
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

// quote quotes a string as JSON and YAML do.
func quote(s string) (string, error) {
	text, err := json.Marshal(s)
	return string(text), err
}

// manifest is an orphan as an object of Kubernetes. Because is the comment about its claim.
type manifest struct {
	*listed
	Driver, ObjectName, Size, Seen, Namespace, ClaimName, Because string
}

var (
	// nameOfKubernetes matches names that an object of Kubernetes may have.
	nameOfKubernetes = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	// ofAChange matches the suffix of the claims for which package claim lets new disks be made.
	ofAChange = regexp.MustCompile(`-(grow|revert)-[0-9a-f]{8}$`)
)

// writeManifests writes the orphans as manifests. An object gets the CSI name, which its
// PersistentVolume had, and is reserved for the claim for which the disk was made. If that claim is
// unknown, or several disks were made for it, the object is reserved for a claim that does not
// exist, so that it is not bound to a wrong one.
func (r *report) writeManifests(out io.Writer) error {
	var all []manifest
	of := map[string]int{}
	for _, o := range r.Orphans {
		if o.Foreign != "" || o.halfDeleted {
			continue
		}
		m := manifest{listed: o, Driver: volume.DriverName, ObjectName: o.CSIName,
			Size: fmt.Sprint(o.SizeBytes), Because: "for which it was made"}
		m.Seen = strings.TrimSpace(fmt.Sprintf("made %s, %s %s", o.Created.UTC().Format(time.DateTime),
			csierr.Plain(o.State), o.AttachedTo))
		if !nameOfKubernetes.MatchString(o.CSIName) {
			m.ObjectName = "oxide-" + o.ID
		}
		m.Namespace, m.ClaimName, _ = strings.Cut(ofAChange.ReplaceAllString(o.Claim, ""), "/")
		all = append(all, m)
		of[string(o.Kind)+m.Namespace+"/"+m.ClaimName]++
	}
	for i, m := range all {
		switch {
		case !nameOfKubernetes.MatchString(m.Namespace) || !nameOfKubernetes.MatchString(m.ClaimName):
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
