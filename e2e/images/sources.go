package images

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// system describes the Debian or Ubuntu that the machine runs. The root file systems are made of
// its packages.
type system struct {
	// codename is the release's codename, such as bookworm.
	codename string
	// sources contains the files with the sources of its packages. They name the user's mirrors; we
	// name no host.
	sources []string
}

// readSystem reads the machine's release and its apt sources below root.
func readSystem(root string) (system, error) {
	release, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if err != nil {
		return system{}, fmt.Errorf("find out which Debian this is: %w", err)
	}
	s := system{codename: codename(string(release))}
	if s.codename == "" {
		return s, fmt.Errorf("expected a Debian or an Ubuntu, and /etc/os-release names no " +
			"VERSION_CODENAME: run the suite with images from registries, or on a Debian")
	}
	files := []string{filepath.Join(root, "etc/apt/sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		more, err := filepath.Glob(filepath.Join(root, "etc/apt/sources.list.d", pattern))
		if err != nil {
			return s, fmt.Errorf("look for apt sources: %w", err)
		}
		files = append(files, more...)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && servesRelease(string(text), strings.HasSuffix(file, ".sources"), s.codename) {
			s.sources = append(s.sources, file)
		}
	}
	if len(s.sources) == 0 {
		return s, fmt.Errorf("expected an apt source with the main packages of %s in "+
			"/etc/apt/sources.list or /etc/apt/sources.list.d, and found none: add one", s.codename)
	}
	return s, nil
}

func codename(osRelease string) string {
	for line := range strings.Lines(osRelease) {
		if value, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return strings.Trim(strings.TrimSpace(value), `"'`)
		}
	}
	return ""
}

// servesRelease reports whether a file of apt sources contains only sources of the release itself.
// The sources of other vendors are left out.
func servesRelease(text string, stanzas bool, codename string) bool {
	entries := oneLineEntries(text)
	if stanzas {
		entries = stanzaEntries(text)
	}
	for _, e := range entries {
		for _, suite := range e.suites {
			base, _, _ := strings.Cut(suite, "/")
			base, kind, _ := strings.Cut(base, "-")
			ours := []string{"", "updates", "security", "backports", "proposed"}
			if base != codename || !slices.Contains(ours, kind) {
				return false
			}
		}
		if !slices.Contains(e.components, "main") {
			return false
		}
	}
	return len(entries) > 0
}

// entry is one source of packages.
type entry struct{ suites, components []string }

// oneLineEntries reads "deb [options] URI suite component…".
func oneLineEntries(text string) []entry {
	var entries []entry
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		line, isDeb := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !isDeb {
			continue
		}
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			_, line, _ = strings.Cut(line, "]")
		}
		if words := strings.Fields(line); len(words) >= 3 {
			entries = append(entries, entry{suites: words[1:2], components: words[2:]})
		}
	}
	return entries
}

// stanzaEntries reads paragraphs of fields.
func stanzaEntries(text string) []entry {
	var entries []entry
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		fields := map[string][]string{}
		lines := bufio.NewScanner(strings.NewReader(paragraph))
		for lines.Scan() {
			if name, value, ok := strings.Cut(lines.Text(), ":"); ok && !strings.HasPrefix(name, "#") {
				fields[strings.ToLower(name)] = strings.Fields(value)
			}
		}
		if slices.Contains(fields["types"], "deb") && !slices.Contains(fields["enabled"], "no") {
			entries = append(entries, entry{suites: fields["suites"], components: fields["components"]})
		}
	}
	return entries
}

// snapshotClient is the module in which the kinds of snapshots are published.
const snapshotClient = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"

// SnapshotCRDs returns the directory with the definitions of the kinds for snapshots.
func (b *Builder) SnapshotCRDs(ctx context.Context) (string, error) {
	// Use another directory, so that the product's module does not require this one.
	out, err := command(ctx, b.directory("sidecars"), nil, "go", "mod", "download", "-json",
		snapshotClient)
	if err != nil {
		return "", fmt.Errorf("get the kinds of snapshots: %w", err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal([]byte(out), &module); err != nil {
		return "", fmt.Errorf("get the kinds of snapshots: %w", err)
	}
	return filepath.Join(module.Dir, "config", "crd"), nil
}
