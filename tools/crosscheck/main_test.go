package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestErrorsOfAnotherSystemAreFoundInProgramsAndTests(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":            "module example.com/m\n\ngo 1.26\n",
		"all.go":            "package m\n\nvar _ = here()\n",
		"here_linux.go":     "package m\n\nfunc here() string { return \"\" }\n",
		"here_darwin.go":    "package m\n\nfunc here() string { return 1 }\n",
		"here_illumos.go":   "package m\n\nfunc here() string { return \"\" }\n",
		"some_test.go":      "package m\n\nimport \"testing\"\n\nfunc TestIt(t *testing.T) { tagged() }\n",
		"tagged_test.go":    "//go:build e2e && !illumos\n\npackage m\n\nfunc tagged() {}\n",
		"sub/sub_darwin.go": "package sub\n\nimport \"example.com/m/gone\"\n\nvar _ = gone.Name\n",
	} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		system string
		want   []string
	}{
		{"linux", nil},
		{"darwin", []string{"here_darwin.go", "example.com/m/gone"}},
		{"illumos", []string{"undefined: tagged"}},
	} {
		problems, err := check(root, tt.system, "e2e")
		if err != nil {
			t.Fatal(err)
		}
		said := strings.Join(problems, "\n")
		for _, want := range tt.want {
			if !strings.Contains(said, want) {
				t.Errorf("%s: expected an error with %s, found %q", tt.system, want, said)
			}
		}
		if len(tt.want) == 0 && said != "" {
			t.Errorf("%s: expected no error, found %q", tt.system, said)
		}
	}
}
