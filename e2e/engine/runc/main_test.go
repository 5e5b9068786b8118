package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheFileWithTheCapabilitiesIsFoundInTheCommandLine(t *testing.T) {
	atContainer := []string{"process", "capabilities"}
	for name, test := range map[string]struct {
		args []string
		file string
		at   []string
	}{
		"create reads the bundle's configuration": {
			args: []string{"--root", "/run/runc", "--log-format", "json", "create", "--bundle", "/b",
				"--pid-file", "/b/init.pid", "id"},
			file: "/b/config.json", at: atContainer,
		},
		"run with a short flag too": {
			args: []string{"run", "-b", "/b", "id"}, file: "/b/config.json", at: atContainer,
		},
		"an equals sign is a value": {
			args: []string{"create", "--bundle=/b", "id"}, file: "/b/config.json", at: atContainer,
		},
		"without a bundle it is the directory one is in": {
			args: []string{"create", "id"}, file: "config.json", at: atContainer,
		},
		"exec reads the process": {
			args: []string{"--log", "/l", "exec", "--process", "/p", "--detach", "id"},
			file: "/p", at: []string{"capabilities"},
		},
		"exec of a command line asks for what the container has": {
			args: []string{"exec", "id", "sh"},
		},
		"a container may be called as a command is": {args: []string{"kill", "create", "9"}},
		"a value may be called as a command is": {
			args: []string{"--root", "run", "--log", "exec", "state", "id"},
		},
		"state asks for nothing":   {args: []string{"state", "id"}},
		"nothing asks for nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			file, at, ok := asked(test.args)
			if file != test.file || !cmp.Equal(at, test.at) || ok != (test.file != "") {
				t.Errorf("asked(%q) = %q, %q, %v, want %q, %q", test.args, file, at, ok,
					test.file, test.at)
			}
		})
	}
}

func TestOnlyTheOneCapabilityIsRemoved(t *testing.T) {
	for name, test := range map[string]struct{ before, after string }{
		"it is gone from every set, and all else is kept": {
			before: `{"ociVersion":"1.0","process":{"oomScoreAdj":-9007199254740993,"capabilities":
				{"bounding":["CAP_KILL","CAP_SYS_RESOURCE"],"effective":["CAP_SYS_RESOURCE"]}}}`,
			after: `{"ociVersion":"1.0","process":{"oomScoreAdj":-9007199254740993,"capabilities":
				{"bounding":["CAP_KILL"],"effective":[]}}}`,
		},
		"a process without capabilities stays": {
			before: `{"process":{"args":["sh"]}}`, after: `{"process":{"args":["sh"]}}`,
		},
		"a document without a process stays": {before: `{"a": 1}`, after: `{"a": 1}`},
		"null is nothing": {
			before: `{"process":{"capabilities":null}}`, after: `{"process":{"capabilities":null}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "config.json")
			if err := os.WriteFile(file, []byte(test.before), 0o640); err != nil {
				t.Fatal(err)
			}
			if err := edit(file, []string{"process", "capabilities"}); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(parsed(t, test.after), parsed(t, string(got))); diff != "" {
				t.Errorf("the document after it (-want +got):\n%s", diff)
			}
		})
	}
}

// parsed parses JSON without changing how its numbers are written.
func parsed(t *testing.T, document string) any {
	t.Helper()
	var value map[string]any
	decoder := json.NewDecoder(bytes.NewReader([]byte(document)))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		t.Fatalf("parse %s: %v", document, err)
	}
	return value
}

func TestADocumentThatIsNotJSONIsRefused(t *testing.T) {
	if _, err := without([]byte(`{"process"`), []string{"process"}, "CAP_KILL"); err == nil {
		t.Error("without took half a document")
	}
	if err := edit(filepath.Join(t.TempDir(), "config.json"), nil); err == nil {
		t.Error("edit took a file that is not there")
	}
}
