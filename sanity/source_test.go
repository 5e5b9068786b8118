//go:build linux

package sanity

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

func TestTheSourceFulfilsItsRequirements(t *testing.T) {
	t.Run("B-7 B-21 the standard is csi.v1, pinned to one version", func(t *testing.T) {
		mod, err := os.ReadFile("../go.mod")
		if err != nil {
			t.Fatal(err)
		}
		const want = "github.com/container-storage-interface/spec v1.13.0"
		if !strings.Contains(string(mod), want) {
			t.Fatalf("go.mod does not require %s", want)
		}
		for _, service := range csiServices() {
			if service.FullName().Parent() != "csi.v1" {
				t.Errorf("%s is not of csi.v1", service.FullName())
			}
		}
	})
	t.Run("B-24 of the reserved variables only CSI_ENDPOINT is read", func(t *testing.T) {
		reserved := regexp.MustCompile(`"CSI_[A-Z_]+"`)
		for _, pattern := range []string{"../driver/*.go", "../driver/*/*.go", "../internal/*/*.go",
			"../cmd/oxide-csi-plugin/*.go"} {
			files, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				source, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, variable := range reserved.FindAllString(string(source), -1) {
					if variable != `"CSI_ENDPOINT"` {
						t.Errorf("%s reads %s, a name that belongs to the standard", file, variable)
					}
				}
			}
		}
	})
	t.Run("B-48 csi-sanity runs in every combination", func(t *testing.T) {
		seen := map[string]bool{}
		for _, c := range csisuite.Combinations() {
			config := c.Config()
			if config.TestVolumeSize%harness.GiB != 0 || !config.TestNodeVolumeAttachLimit {
				t.Errorf("%s: size %d, limit tried: %t", c, config.TestVolumeSize,
					config.TestNodeVolumeAttachLimit)
			}
			seen[fmt.Sprintf("%s split=%t", config.TestVolumeAccessType, c.Split)] = true
		}
		for _, want := range []string{"mount split=false", "mount split=true",
			"block split=false", "block split=true"} {
			if !seen[want] {
				t.Errorf("csi-sanity does not run with %s", want)
			}
		}
	})
}
