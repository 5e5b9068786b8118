package audit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// report is the result of an audit.
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

// found reports whether orphans or missing objects are left, or an object that a person named.
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

// write writes the report and, as the last line, its figure. Without a table the figure goes to
// log, so that out is valid.
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
