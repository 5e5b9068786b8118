package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
)

// project is the URL of the sources.
const project = "https://github.com/oxidecomputer/oxide-csi-plugin"

func (r *release) notes(context.Context) error {
	changelog, err := os.ReadFile(filepath.Join(r.Root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	notes, err := section(string(changelog), r.Version)
	if err != nil {
		return err
	}
	return r.write("RELEASE_NOTES.md", []byte(notes))
}

// link matches a relative link to a file of the project, which does not work on another page.
var link = regexp.MustCompile(`\]\(([^):#]+[^):]*)\)`)

// section returns a version's section of the changelog. For a version before a release, such as
// v1.2.3-rc.1, it returns the section of unreleased changes.
func section(changelog, version string) (string, error) {
	wanted := []string{version}
	if semver.Prerelease(version) != "" {
		wanted = append(wanted, "Unreleased")
	}
	for _, heading := range wanted {
		for part := range strings.SplitSeq("\n"+changelog, "\n## ") {
			title, text, _ := strings.Cut(part, "\n")
			name, _, _ := strings.Cut(title, " ") // a date may follow
			text = strings.TrimSpace(text)
			if name != heading || text == "" {
				continue
			}
			return link.ReplaceAllString(text, "]("+project+"/blob/"+version+"/$1)") + "\n", nil
		}
	}
	return "", fmt.Errorf("CHANGELOG.md has nothing for %s: expected a section headed \"## %s\" "+
		"with text; rename the section Unreleased", version, version)
}
