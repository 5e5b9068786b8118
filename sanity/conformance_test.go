//go:build linux

package sanity

import (
	"strings"
	"testing"
)

func TestMarkedNamesStayWithinTheLimitAndDistinct(t *testing.T) {
	long := strings.Repeat("n", maxNameLength)
	one, other := markedName("mark", long), markedName("mark", long[1:]+"o")
	switch {
	case markedName("mark", "") != "":
		t.Error("an empty name must stay empty")
	case markedName("mark", "sanity") != "mark-sanity":
		t.Errorf("markedName = %q", markedName("mark", "sanity"))
	case len(one) != maxNameLength || len(other) != maxNameLength:
		t.Errorf("long names have %d and %d bytes", len(one), len(other))
	case one == other:
		t.Error("two long names have become one")
	}
}

func TestAnObjectIsOursByItsDescriptionOnly(t *testing.T) {
	for description, want := range map[string]bool{
		`csi.oxide.computer {"name":"x","cluster":"mark-1"}`:  true,
		`csi.oxide.computer {"name":"mark-1","cluster":"c"}`:  false,
		`csi.oxide.computer {"name":"x","cluster":"mark-12"}`: false,
		`mark-1`: false,
		``:       false,
	} {
		if got := carriesMark(description, "mark-1"); got != want {
			t.Errorf("carriesMark(%q) = %t, want %t", description, got, want)
		}
	}
}
