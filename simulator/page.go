package simulator

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

const (
	byName           = "name_ascending"
	byNameDescending = "name_descending"
	byID             = "id_ascending"

	defaultLimit = 100
	maxLimit     = 10000
	maxToken     = 512
)

// scan says which part of a list is asked for: by the query of its first page, or by the token
// of a later one, in which the query rides along (A09).
type scan struct {
	SortBy   string  `json:"sort_by"`
	Project  string  `json:"project,omitempty"`
	Instance string  `json:"instance,omitempty"`
	LastSeen *string `json:"last_seen,omitempty"`

	limit int
}

type pageToken struct {
	V     string `json:"v"`
	Start scan   `json:"page_start"`
}

// page is a part of a list. NextPage is null only when there is nothing in Items (A10).
type page[T any] struct {
	NextPage *string `json:"next_page"`
	Items    []T     `json:"items"`
}

// parseScan reads a list's query. With a token the other parameters but limit are not looked at.
func parseScan(query url.Values, required []string) (scan, error) {
	limit, err := parseLimit(query.Get("limit"))
	if err != nil {
		return scan{}, err
	}
	if token := query.Get("page_token"); token != "" {
		s, err := parseToken(token)
		s.limit = limit
		return s, err
	}
	s := scan{SortBy: query.Get("sort_by"), Project: query.Get("project"),
		Instance: query.Get("instance"), limit: limit}
	switch s.SortBy {
	case "":
		s.SortBy = byName
	case byName, byNameDescending, byID:
	default:
		return s, badQuery("unknown variant `%s`, expected one of `name_ascending`, "+
			"`name_descending`, `id_ascending`", s.SortBy)
	}
	for _, name := range required {
		if query.Get(name) == "" {
			return s, badQuery("missing field `%s`", name)
		}
	}
	return s, nil
}

func parseLimit(s string) (int, error) {
	if s == "" {
		return defaultLimit, nil
	}
	limit, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, badQuery("invalid digit found in string")
	}
	if limit == 0 {
		return 0, badQuery("expected a non-zero value")
	}
	return int(min(limit, maxLimit)), nil
}

func parseToken(token string) (scan, error) {
	const failed = "failed to parse pagination token: "
	if len(token) > maxToken {
		return scan{}, badQuery(failed + "too large")
	}
	data, err := base64.URLEncoding.DecodeString(token)
	if err != nil {
		return scan{}, badQuery(failed+"%s", err)
	}
	var t pageToken
	if json.Unmarshal(data, &t) != nil || t.Start.LastSeen == nil {
		return scan{}, badQuery(failed + "corrupted token")
	}
	switch t.Start.SortBy {
	case byName, byNameDescending, byID:
	default:
		return scan{}, badQuery(failed + "corrupted token")
	}
	if t.V != "v1" {
		return scan{}, badQuery(failed+"unsupported version: %s", t.V)
	}
	return t.Start, nil
}

// after makes the token of the page that begins behind an item.
func (s scan) after(item identity) *string {
	last := item.Name
	if s.SortBy == byID {
		last = item.ID
	}
	s.LastSeen = &last
	data, err := json.Marshal(pageToken{V: "v1", Start: s})
	if err != nil {
		panic(err) // strings always encode
	}
	token := base64.URLEncoding.EncodeToString(data)
	return &token
}

// newPage puts items into a page of the scan.
func newPage[T any](s scan, items []T, ident func(T) identity) page[T] {
	p := page[T]{Items: items}
	if len(items) > 0 {
		p.NextPage = s.after(ident(items[len(items)-1]))
	}
	return p
}

// emptyPage is a list in which nothing is.
func emptyPage() page[struct{}] { return page[struct{}]{Items: []struct{}{}} }

// slice takes the scan's page out of items that are few and all at hand.
func slice[T any](s scan, items []T, ident func(T) identity) page[T] {
	sorted := sortedBy(s.SortBy, items, ident)
	out := []T{}
	for _, item := range sorted {
		if len(out) < s.limit && s.behind(ident(item)) {
			out = append(out, item)
		}
	}
	return newPage(s, out, ident)
}

// behind says that an item comes after the last one seen.
func (s scan) behind(item identity) bool {
	switch {
	case s.LastSeen == nil:
		return true
	case s.SortBy == byID:
		return item.ID > *s.LastSeen
	case s.SortBy == byNameDescending:
		return item.Name < *s.LastSeen
	}
	return item.Name > *s.LastSeen
}

func sortedBy[T any](sortBy string, items []T, ident func(T) identity) []T {
	sorted := slices.Clone(items)
	slices.SortFunc(sorted, func(a, b T) int {
		switch sortBy {
		case byID:
			return strings.Compare(ident(a).ID, ident(b).ID)
		case byNameDescending:
			return strings.Compare(ident(b).Name, ident(a).Name)
		}
		return strings.Compare(ident(a).Name, ident(b).Name)
	})
	return sorted
}
