package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	versionRow = regexp.MustCompile("(?m)^\\|[^|\n]*\\| ([^|\n]*[0-9][^|\n]*) \\| `([^`\n]+)`")
	version    = regexp.MustCompile(`[a-z0-9-]*[0-9]+\.[0-9.]*[0-9]`)
)

func TestTheVersionsInThePageAreThoseInTheFilesThatItNames(t *testing.T) {
	page, err := os.ReadFile("requirements.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := versionRow.FindAllStringSubmatch(string(page), -1)
	if len(rows) < 14 {
		t.Fatalf("found %d rows with versions, expected more", len(rows))
	}
	for _, row := range rows {
		file, err := os.ReadFile(filepath.Join(root, row[2]))
		if err != nil {
			t.Error(err)
		}
		versions := version.FindAllString(row[1], -1)
		if len(versions) == 0 {
			t.Errorf("docs/requirements.md: %q has no version", row[0])
		}
		for _, v := range versions {
			if !strings.Contains(string(file), v) {
				t.Errorf("docs/requirements.md says %s of %s, which does not contain it", v, row[2])
			}
		}
	}
	// Every version of Kubernetes that the suite runs on is on the page.
	workflow, err := os.ReadFile(filepath.Join(root, ".github/workflows/e2e.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	matrix := regexp.MustCompile(`kubernetes: \[(.+)\]`).FindSubmatch(workflow)
	if matrix == nil {
		t.Fatal("the workflow e2e.yaml has no matrix of Kubernetes' versions")
	}
	if !strings.Contains(string(page), "| "+string(matrix[1])+" |") {
		t.Errorf("the suite runs on %s, and docs/requirements.md does not say so", matrix[1])
	}
}
