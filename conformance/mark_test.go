//go:build linux

package conformance

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

func TestOnlyTheDescriptionAssignsAnObjectToARun(t *testing.T) {
	for description, want := range map[string]string{
		`csi.oxide.computer {"name":"x","cluster":"oxide-conformance-1a2b3c4d"}`:    "1a2b3c4d",
		`oxide-conformance {"run":"1a2b3c4d"}`:                                      "1a2b3c4d",
		mark{Run: "1a2b3c4d", Host: "h"}.description():                              "1a2b3c4d",
		`csi.oxide.computer {"name":"oxide-conformance-1a2b3c4d","cluster":"c"}`:    "",
		`csi.oxide.computer {"name":"x","cluster":"oxide-conformance-1a2b3c4d0"}`:   "",
		`csi.oxide.computer {"name":"x","cluster":"my-oxide-conformance-1a2b3c4d"}`: "",
		`csi.oxide.computer {"name":"x","cluster":"oxide-conformance-1A2B3C4D"}`:    "",
		`csi.oxide.computer {"name":"x"}`:                                           "",
		`oxide-conformance {"run":"1a2b3c4d`:                                        "",
		`oxide-conformance {"run":"production"}`:                                    "",
		`oxide-conformance 1a2b3c4d`:                                                "",
		`my oxide-conformance {"run":"1a2b3c4d"}`:                                   "",
		`oxide-conformance-1a2b3c4d`:                                                "",
		``:                                                                          "",
	} {
		if got, ok := runOf(description); got != want && ok || ok != (want != "") {
			t.Errorf("runOf(%q) = %q, %t; want %q", description, got, ok, want)
		}
	}
}
