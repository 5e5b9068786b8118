package simulator

import (
	"regexp"
	"strings"
	"testing"
)

func TestEveryOperationOfTheRackHasARoute(t *testing.T) {
	names := map[string]bool{}
	for _, op := range routes {
		names[op.name] = true
		path := "/" + regexp.MustCompile(`{[^}]*}`).
			ReplaceAllString(strings.Join(op.path, "/"), "x")
		got, _, err := route(op.method, path)
		if err != nil || got.name != op.name {
			t.Errorf("%s %s leads to %+v (%v), want %s", op.method, path, got, err, op.name)
		}
	}
	for name := range served {
		if !names[name] {
			t.Errorf("%s is served but no operation of the rack", name)
		}
	}
}
