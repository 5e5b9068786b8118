package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestThePageOfTheConfigurationListsTheParametersOfAStorageClass(t *testing.T) {
	page, err := os.ReadFile("configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	// A test of driver/volume compares the file with the driver.
	file, err := os.ReadFile(filepath.Join(root, "deploy/chart/parameters.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var known struct {
		Parameters  []string `json:"parameters"`
		MkfsOptions map[string]struct {
			Filesystems []string `json:"filesystems"`
			Valid       string   `json:"valid"`
		} `json:"mkfsOptions"`
	}
	if err := yaml.Unmarshal(file, &known); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, name := range known.Parameters {
		want = append(want, fmt.Sprintf("| `%s` |", name))
	}
	for name, option := range known.MkfsOptions {
		want = append(want, fmt.Sprintf("| `%s` | %s | %s |", name,
			strings.Join(option.Filesystems, ", "), option.Valid))
	}
	if len(want) < 10 {
		t.Errorf("the file has %d parameters and options, expected more", len(want))
	}
	for _, row := range want {
		if !strings.Contains(string(page), row) {
			t.Errorf("docs/configuration.md has no row %s", row)
		}
	}
}
