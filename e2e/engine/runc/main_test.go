package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSysResourceIsRemovedFromEveryListOfCapabilities(t *testing.T) {
	for document, want := range map[string]string{
		`{"a": ["CAP_SYS_RESOURCE"]}`:                          `{"a": []}`,
		`{"a": ["CAP_SYS_RESOURCE", "B"], "b": ["B"]}`:         `{"a": [ "B"], "b": ["B"]}`,
		`{"a":["A","CAP_SYS_RESOURCE","B"],"b":["A"]}`:         `{"a":["A","B"],"b":["A"]}`,
		"{\"a\": [\"A\",\n\"CAP_SYS_RESOURCE\"], \"b\": null}": `{"a": ["A"], "b": null}`,
		`{"a": ["CAP_SYS_RESOURCES", "CAP_SYS_RESOURCE"]}`:     `{"a": ["CAP_SYS_RESOURCES"]}`,
	} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := edit(file); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s becomes %s, %v, want %s", document, got, err, want)
		}
	}
}
