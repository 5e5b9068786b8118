package conformance

import (
	"os/exec"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
)

// toolVersions asks the filesystems' tools for their versions.
func toolVersions() map[string]string {
	versions := map[string]string{}
	for tool, flag := range map[string]string{"mke2fs": "-V", "mkfs.xfs": "-V",
		"mkfs.btrfs": "--version", "blkid": "--version"} {
		out, err := exec.Command(tool, flag).CombinedOutput()
		if first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n"); err == nil {
			versions[tool] = first
		}
	}
	return versions
}

// osRelease returns the system's name, or "" if it is unknown.
func osRelease() string {
	text, _ := guest.ReadFile("/etc/os-release")
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); is {
			return strings.Trim(name, `"`)
		}
	}
	return ""
}
