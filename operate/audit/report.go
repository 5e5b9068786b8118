package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// report is the result of an audit.
type report struct {
	Cluster  string          `json:"cluster"`
	Project  string          `json:"project"`
	ListedAt time.Time       `json:"listedAt"`
	Owned    int             `json:"owned"`
	Wanted   int             `json:"wanted"`
	Deleted  int             `json:"deleted"`
	TooYoung int             `json:"tooYoung"`
	Orphans  []*orphan       `json:"orphans"`
	Missing  []missingObject `json:"missing"`
	Static   []staticObject  `json:"static"`
}

// orphan is an object of this cluster that is not wanted.
type orphan struct {
	object

	Deleted    bool   `json:"deleted"`
	SkipReason string `json:"skipReason,omitempty"` // why it is not deleted, with --delete
}

// missingObject is a wanted volume or snapshot that is not on the rack.
type missingObject struct {
	Kind     Kind   `json:"kind"`
	ID       string `json:"id"`
	WantedBy string `json:"wantedBy"`
}

// staticObject is a wanted object that this cluster's driver did not make.
type staticObject struct {
	object

	WantedBy string `json:"wantedBy"`
}

// found reports whether orphans or missing objects are left.
func (r *report) found() bool { return len(r.Missing) > 0 || r.Deleted < len(r.Orphans) }

// write writes the report and, as the last line, its figure. With JSON the figure goes to log, so
// that out is valid JSON.
func (r *report) write(asJSON bool, out, log io.Writer) error {
	figureTo := out
	if asJSON {
		figureTo = log
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(r); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
	} else if err := r.writeTables(out); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	_, err := fmt.Fprintf(figureTo, "FIGURE audit owned=%d wanted=%d orphans=%d missing=%d "+
		"deleted=%d too_young=%d\n",
		r.Owned, r.Wanted, len(r.Orphans), len(r.Missing), r.Deleted, r.TooYoung)
	return err
}

func (r *report) writeTables(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	if len(r.Orphans) > 0 {
		line("ORPHANS: made for this cluster, not wanted")
		line("KIND\tID\tNAME\tCSI NAME\tCLAIM\tSIZE\tAGE\tSTATE\tATTACHED TO\tDELETED")
		for _, o := range r.Orphans {
			line("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", o.Kind, o.ID, csierr.Plain(o.Name),
				csierr.Plain(o.CSIName), orDash(csierr.Plain(o.Claim)), sizeText(o.SizeBytes),
				o.age(r.ListedAt), csierr.Plain(o.State), orDash(o.AttachedTo), o.deleted())
		}
		line("")
	}
	if len(r.Missing) > 0 {
		line("MISSING: wanted, not on the rack")
		line("KIND\tID\tWANTED BY")
		for _, m := range r.Missing {
			line("%s\t%s\t%s", m.Kind, csierr.Plain(m.ID), csierr.Plain(m.WantedBy))
		}
		line("")
	}
	if len(r.Static) > 0 {
		line("STATIC: wanted, not made by this cluster's driver, which never deletes them")
		line("KIND\tID\tNAME\tWANTED BY\tNOT OURS BECAUSE")
		for _, s := range r.Static {
			line("%s\t%s\t%s\t%s\t%s", s.Kind, s.ID, csierr.Plain(s.Name), csierr.Plain(s.WantedBy),
				csierr.Plain(s.Foreign))
		}
		line("")
	}
	if r.TooYoung > 0 {
		line("TOO YOUNG TO JUDGE: %d, made less than --min-age before the list of wanted volumes, or "+
			"after it; a later audit judges them", r.TooYoung)
		line("")
	}
	return w.Flush()
}

func (o *orphan) deleted() string {
	switch {
	case o.Deleted:
		return "yes"
	case o.SkipReason != "":
		return "no: " + csierr.Plain(o.SkipReason)
	case o.Foreign != "":
		return "no: it " + csierr.Plain(o.Foreign)
	}
	return "no"
}

func (o object) age(at time.Time) string {
	if o.Created.IsZero() {
		return "-"
	}
	return formatAge(at.Sub(o.Created))
}

func sizeText(bytes int64) string {
	if bytes%volume.GiB == 0 {
		return fmt.Sprintf("%d GiB", bytes/volume.GiB)
	}
	return fmt.Sprintf("%d bytes", bytes)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
