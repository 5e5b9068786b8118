package simulator

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const (
	defaultLimit = 100
	maxLimit     = 10000
	maxToken     = 512
)

var orders = []string{store.ByName, store.ByNameDescending, store.ByID}

// scan identifies the requested page of a list. It comes from the query for the first page, and
// from the page token for later pages (A09).
type scan struct {
	engine.Window
	// Parents are the query parameters that name the list's project or other parent.
	Parents map[string]string
}

// pageToken is the decoded token of a page. Start has sort_by, the parents and last_seen.
type pageToken struct {
	V     string             `json:"v"`
	Start map[string]*string `json:"page_start"`
}

// page is one page of a list. A paginated list's NextPage is null only if Items is empty (A10).
type page[T any] struct {
	NextPage *string `json:"next_page"`
	Items    []T     `json:"items"`
}

type named interface{ Ident() store.Identity }

// parseScan parses a list's query. A page token overrides all other parameters except limit.
func parseScan(query url.Values, selectors []string) (scan, error) {
	limit, err := parseLimit(query)
	if err != nil {
		return scan{}, err
	}
	if query.Has("page_token") {
		s, err := parseToken(query.Get("page_token"))
		s.Limit = limit
		return s, err
	}
	s := scan{engine.Window{SortBy: store.ByName, Limit: limit}, map[string]string{}}
	for _, name := range selectors {
		if query.Get(name) != "" {
			s.Parents[name] = query.Get(name)
		}
	}
	if query.Has("sort_by") {
		s.SortBy = query.Get("sort_by")
	}
	if !slices.Contains(orders, s.SortBy) {
		return s, badQuery("%s", unknownVariant(s.SortBy, orders))
	}
	return s, nil
}

func (s scan) selectors() url.Values {
	given := url.Values{}
	for name, value := range s.Parents {
		given.Set(name, value)
	}
	return given
}

func parseLimit(query url.Values) (int, error) {
	if !query.Has("limit") {
		return defaultLimit, nil
	}
	limit, err := parseNumber(query.Get("limit"), 32)
	if err == nil && limit == 0 {
		err = badQuery("invalid value: integer `0`, expected a nonzero u32")
	}
	return int(min(limit, maxLimit)), err
}

// parseNumber parses a number in the query with the errors of Rust's parser.
func parseNumber(given string, bits int) (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(given, "+"), 10, bits)
	switch {
	case given == "":
		return 0, badQuery("cannot parse integer from empty string")
	case errors.Is(err, strconv.ErrRange):
		return 0, badQuery("number too large to fit in target type")
	case err != nil:
		return 0, badQuery("invalid digit found in string")
	}
	return n, nil
}

func parseToken(token string) (scan, error) {
	const failed = "failed to parse pagination token: "
	if len(token) > maxToken {
		return scan{}, badQuery(failed + "too large")
	}
	data, problem := decodeToken(token)
	if problem != "" {
		return scan{}, badQuery(failed+"%s", problem)
	}
	var t pageToken
	if json.Unmarshal(data, &t) != nil || t.V != "v1" || t.Start["last_seen"] == nil {
		return scan{}, badQuery(failed + "corrupted token")
	}
	s := scan{engine.Window{After: t.Start["last_seen"]}, map[string]string{}}
	for name, value := range t.Start {
		switch {
		case value == nil, name == "last_seen":
		case name == "sort_by":
			s.SortBy = *value
		default:
			s.Parents[name] = *value
		}
	}
	if !slices.Contains(orders, s.SortBy) {
		return scan{}, badQuery(failed + "corrupted token")
	}
	return s, nil
}

// decodeToken decodes a token, or returns the error message of the rack's base64 library (A09).
func decodeToken(token string) ([]byte, string) {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	symbols, last := len(strings.TrimRight(token, "=")), max(len(token)-1, 0)
	quad := last / 4 * 4
	wrong := strings.IndexFunc(token[:symbols], func(r rune) bool {
		return !strings.ContainsRune(alphabet, r)
	})
	switch {
	case last == quad && wrong >= 0 && symbols > last && !strings.Contains(alphabet, token[last:]):
		wrong = last // the rack's library checks for a surplus symbol first
	case wrong < 0 && symbols < len(token) && symbols < quad+2:
		wrong = symbols
	}
	data, err := base64.URLEncoding.Strict().DecodeString(token)
	switch {
	case wrong >= 0:
		return nil, fmt.Sprintf("Invalid symbol %d, offset %d.", token[wrong], wrong)
	case token != "" && last == quad:
		return nil, fmt.Sprintf("Invalid input length: %d", len(token))
	case len(token)%4 != 0:
		return nil, "Invalid padding"
	case err != nil:
		return nil, fmt.Sprintf("Invalid last symbol %d, offset %d.", token[symbols-1], symbols-1)
	}
	return data, ""
}

// after returns a page token, as a rack writes it. The page begins after the given item.
func (s scan) after(item store.Identity) *string {
	last := item.Name
	if s.SortBy == store.ByID {
		last = item.ID
	}
	var b strings.Builder
	b.WriteString(`{"v":"v1","page_start":{"sort_by":` + quoted(s.SortBy))
	for _, name := range slices.Sorted(maps.Keys(s.Parents)) {
		b.WriteString("," + quoted(name) + ":" + quoted(s.Parents[name]))
	}
	b.WriteString(`,"last_seen":` + quoted(last) + "}}")
	token := base64.URLEncoding.EncodeToString([]byte(b.String()))
	return &token
}

func quoted(s string) string { return string(encode(s, "")) }

func newPage[T named](s scan, items []T) page[T] {
	p := page[T]{Items: items}
	if len(items) > 0 {
		p.NextPage = s.after(items[len(items)-1].Ident())
	}
	return p
}

func slice[T named](s scan, items []T) page[T] {
	key, order := func(item T) string { return item.Ident().Name }, strings.Compare
	switch s.SortBy {
	case store.ByID:
		key = func(item T) string { return item.Ident().ID }
	case store.ByNameDescending:
		order = func(a, b string) int { return strings.Compare(b, a) }
	}
	out := []T{}
	for _, item := range items {
		if s.After == nil || order(key(item), *s.After) > 0 {
			out = append(out, item)
		}
	}
	slices.SortFunc(out, func(a, b T) int { return order(key(a), key(b)) })
	return newPage(s, out[:min(s.Limit, len(out))])
}
