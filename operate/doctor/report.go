package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// Write writes the diagnosis, for people or as JSON.
func (d Diagnosis) Write(w io.Writer, o Options) error {
	var text []byte
	var err error
	switch {
	case o.JSON:
		text, err = indented(d)
	case o.Question.Kind == AskCluster:
		text = d.treeText(o.Colour)
	default:
		text = d.text()
	}
	if err != nil {
		return fmt.Errorf("write the diagnosis: %w", err)
	}
	// In one piece, so that no secret is split among writes.
	if _, err := w.Write(text); err != nil {
		return fmt.Errorf("write the diagnosis: %w", err)
	}
	return nil
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(v)
	return b.Bytes(), err
}

func (d Diagnosis) text() []byte {
	var b bytes.Buffer
	for _, c := range d.Chains {
		fmt.Fprintf(&b, "%s\n\n", c.Subject)
		for _, s := range c.Links {
			fmt.Fprintf(&b, "  %-11s %-8s %s\n", s.Link, s.State, s.What)
			for _, note := range s.Notes {
				fmt.Fprintf(&b, "  %-11s %-8s   %s\n", "", "", note)
			}
		}
		b.WriteByte('\n')
		c.writeFinding(&b)
		b.WriteByte('\n')
	}
	d.writeFigure(&b)
	return b.Bytes()
}

func (d Diagnosis) writeFigure(b *bytes.Buffer) {
	fmt.Fprintf(b, "FIGURE doctor chains=%d broken=%d unseen=%d status=%d\n", len(d.Chains),
		d.count(Broken), d.count(Unseen), d.Status())
}

func (d Diagnosis) count(state State) (n int) {
	for _, c := range d.Chains {
		for _, s := range c.Links {
			if s.State == state {
				n++
			}
		}
	}
	return n
}

func (c Chain) unseen() string {
	var unseen []string
	for _, s := range c.Links {
		if s.State == Unseen {
			unseen = append(unseen, string(s.Link))
		}
	}
	return strings.Join(unseen, ", ")
}

func (c Chain) writeFinding(b *bytes.Buffer) {
	f := c.Finding
	if f == nil {
		but := ""
		if unseen := c.unseen(); unseen != "" {
			but = ", but these links could not be seen: " + unseen
		}
		fmt.Fprintf(b, "  Nothing broken was found%s.\n", but)
		return
	}
	fmt.Fprintf(b, "  BROKEN LINK: %s\n", f.Link)
	line := func(word, text string) {
		if text != "" {
			fmt.Fprintf(b, "  %-11s %s\n", word, text)
		}
	}
	line("wrong", f.Wrong)
	if f.Reason != "" {
		line("reason", string(f.Reason)+" (docs/reasons.md)")
	}
	line("says", f.Source)
	if !f.Since.IsZero() {
		line("since", f.Since.UTC().Format(timeFormat))
	}
	if f.Last.After(f.Since) {
		line("last", f.Last.UTC().Format(timeFormat))
	}
	line("by itself", f.ByItself)
	line("do", f.Do)
	line("next", f.Next)
}

// bundle is what a support case needs. The evidence was sifted: no Secret, no environment, no mount
// option, no token and no text of others is in it.
type bundle struct {
	Format    int       `json:"format"`
	Version   string    `json:"version"`
	Diagnosis Diagnosis `json:"diagnosis"`
	Evidence  Evidence  `json:"evidence"`
}

const bundleFormat = 1

// WriteBundle writes the diagnosis and its evidence as JSON.
func WriteBundle(w io.Writer, d Diagnosis, e Evidence) error {
	text, err := indented(bundle{Format: bundleFormat, Version: e.Version, Diagnosis: d, Evidence: e})
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

const timeFormat = time.RFC3339

// firstOf joins words, and counts those beyond a few.
func firstOf(words []string) string {
	const most = 8
	if len(words) <= most {
		return strings.Join(words, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:most], ", "), len(words)-most)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
