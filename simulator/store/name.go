package store

import (
	"fmt"
	"strings"

	"github.com/google/uuid"
)

// MaxName is the greatest length of a name.
const MaxName = 63

// CheckName returns the rack's error for an invalid name, or "" (A04). The published pattern allows
// upper case, but the rack does not.
func CheckName(name string) string {
	switch {
	case name == "":
		return "name requires at least one character"
	case len(name) > MaxName:
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

// Selector is a value of the rack's type NameOrId. A text in the form of a UUID is an ID, and
// every other text is a name (A05). The zero value means that none was given.
type Selector struct{ ID, Name string }

// InvalidNameOrID is the rack's error for a text that is neither a name nor an ID (A05).
const InvalidNameOrID = "data did not match any variant of untagged enum NameOrId"

// ParseSelector parses a name or an ID. For any other text it returns the problem in the rack's
// words.
func ParseSelector(s string) (sel Selector, problem string) {
	if id, err := uuid.Parse(s); err == nil {
		return Selector{ID: id.String()}, ""
	}
	if CheckName(s) != "" {
		problem = InvalidNameOrID
	}
	return Selector{Name: s}, problem
}

func (s Selector) String() string {
	if s.ID != "" {
		return s.ID
	}
	return s.Name
}

// Given reports whether there is a name or an ID.
func (s Selector) Given() bool { return s != Selector{} }

// DerivedID returns the same ID for the same words, so that an object of the config has the same
// ID in every directory and on every machine.
func DerivedID(words ...string) string {
	return uuid.NewSHA1(namespace, []byte(strings.Join(words, "/"))).String()
}

// namespace is the UUID namespace of derived IDs.
var namespace = uuid.MustParse("e1a6c2d4-5c0b-4d0e-9a7b-6f1d2f6c0de5")
