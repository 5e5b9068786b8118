package simulator

import (
	"fmt"
	"strings"

	"github.com/google/uuid"
)

const maxName = 63

// nameProblem says what the rack has against a name, in its words, or "" (A04). The published
// pattern allows upper case; the rack does not.
func nameProblem(name string) string {
	switch {
	case name == "":
		return "name requires at least one character"
	case len(name) > maxName:
		return "name may contain at most 63 characters"
	case name[0] < 'a' || name[0] > 'z':
		return "name must begin with an ASCII lowercase character"
	}
	for _, c := range name {
		if !nameCharacter(c) {
			return fmt.Sprintf("name contains invalid character: %q (allowed characters are "+
				"lowercase ASCII, digits, and \"-\")", string(c))
		}
	}
	if strings.HasSuffix(name, "-") {
		return `name cannot end with "-"`
	}
	if _, err := uuid.Parse(name); err == nil {
		return "name cannot be a UUID to avoid ambiguity with IDs"
	}
	return ""
}

func nameCharacter(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-'
}

// selector is what the rack calls a NameOrId: what parses as a UUID is an ID, the rest a name
// (A05). The zero value is one that was not given.
type selector struct{ id, name string }

// notNameOrID is the rack's only word against what is neither a name nor an ID (A05).
const notNameOrID = "data did not match any variant of untagged enum NameOrId"

func parseSelector(s string) (sel selector, problem string) {
	if id, err := uuid.Parse(s); err == nil {
		return selector{id: id.String()}, ""
	}
	if nameProblem(s) != "" {
		problem = notNameOrID
	}
	return selector{name: s}, problem
}

func (s selector) String() string {
	if s.id != "" {
		return s.id
	}
	return s.name
}

func (s selector) given() bool { return s != selector{} }

// derivedID is the same for the same words, so that what is named at start keeps its ID over
// directories and machines.
func derivedID(words ...string) string {
	return uuid.NewSHA1(namespace, []byte(strings.Join(words, "/"))).String()
}

// namespace is this simulator's, for derived IDs.
var namespace = uuid.MustParse("e1a6c2d4-5c0b-4d0e-9a7b-6f1d2f6c0de5")
