package simulator

import (
	"maps"
	"net/url"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// The seeds are in testdata/fuzz.

// FuzzPageToken demands that an accepted token is one that this simulator could have returned.
// The token for the next item must be accepted again, with the same scan behind the item.
func FuzzPageToken(f *testing.F) {
	f.Fuzz(func(t *testing.T, token, last string) {
		s, err := parseToken(token)
		if err != nil {
			if answer := err.Error(); strings.ContainsAny(answer, "\n") {
				t.Fatalf("the answer has several lines: %q", answer)
			}
			return
		}
		if s.LastSeen == nil || len(token) > maxToken {
			t.Fatalf("%q is taken: %+v", token, s)
		}
		last = strings.ToValidUTF8(last, "")
		next := s.after(store.Identity{ID: last, Name: last})
		if len(*next) > maxToken {
			return
		}
		again, err := parseToken(*next)
		if err != nil || *again.LastSeen != last || again.SortBy != s.SortBy ||
			!maps.Equal(again.Parents, s.Parents) {
			t.Fatalf("%+v behind %q becomes %+v, %v", s, last, again, err)
		}
	})
}

// FuzzListQuery demands that a list's query is refused, or returns a limit and an order that the
// lists have.
func FuzzListQuery(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		query, err := url.ParseQuery(text)
		if err != nil {
			return
		}
		s, err := parseScan(query, inProject)
		switch {
		case err != nil:
		case s.limit < 1 || s.limit > maxLimit,
			s.SortBy != store.ByName && s.SortBy != store.ByNameDescending && s.SortBy != store.ByID,
			query.Has("page_token") != (s.LastSeen != nil):
			t.Fatalf("%q is the scan %+v", text, s)
		}
	})
}

// FuzzSelector demands that a selector is either an ID or a name, and that no name has the form
// of an ID.
func FuzzSelector(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		s, problem := store.ParseSelector(text)
		_, err := uuid.Parse(text)
		switch {
		case (s.ID != "") != (err == nil), s.ID != "" && s.Name != "":
			t.Fatalf("%q selects %+v", text, s)
		case s.ID != "" && (problem != "" || len(s.ID) != 36 || s.ID != strings.ToLower(s.ID)):
			t.Fatalf("%q selects %+v: %s", text, s, problem)
		case s.ID == "" && problem == "" && (len(text) > store.MaxName ||
			strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789-") != ""):
			t.Fatalf("%q is taken for a name", text)
		}
	})
}
