package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func TestTheRackAcceptsOnlyAnEmptyOrItsOwnDirectory(t *testing.T) {
	for _, test := range []struct {
		name, path string // path is an entry of the directory, with a slash at its end a directory
		want       string // part of the refusal; "" means that the directory is accepted
	}{
		{"an empty one", "", ""},
		{"the root of a filesystem", "lost+found/", ""},
		{"an identity that was chosen for the rack", "identity", ""},
		{"views of guests that wait for their rack", "guests/0a1de000/", ""},
		{"a guest's view with something in it", "guests/0a1de000/dev/", `it holds "guests"`},
		{"a file among the guests", "guests/note", `it holds "guests"`},
		{"somebody's file", "thesis.txt", `it holds "thesis.txt"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, test.path)
			simtest.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			if strings.HasSuffix(test.path, "/") {
				simtest.NoError(t, os.MkdirAll(path, 0o755))
			} else if test.path != "" {
				simtest.NoError(t, os.WriteFile(path, nil, 0o600))
			}
			err := prepareDir(dir)
			switch {
			case test.want == "":
				if err != nil {
					t.Errorf("prepareDir = %v, want it taken", err)
				}
			case err == nil || !strings.Contains(err.Error(), test.want):
				t.Errorf("prepareDir = %v, want an error with %q", err, test.want)
			default:
				if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
					t.Errorf("a refused directory has %v (%v)", left, err)
				}
			}
		})
	}
}
