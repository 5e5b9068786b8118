package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestAReleaseHasOneChartAndTheImagesThatItWants(t *testing.T) {
	dir := t.TempDir()
	for _, step := range []struct{ made, lacks string }{
		{"oxide-csi-plugin-linux-amd64", "oxide-csi-driver-VERSION.tgz"},
		{"oxide-csi-driver-1.2.3.tgz", "oxide-csi-plugin.oci.tar"},
		{"oxide-csi-plugin.oci.tar", "oxide-csi-plugin-node.oci.tar"},
		{"oxide-csi-plugin-node.oci.tar", "oxide-node-keeper.oci.tar"},
		{"oxide-node-keeper.oci.tar", ""},
		{"oxide-csi-driver-1.2.4.tgz", "one chart"},
	} {
		csitest.Must(t, os.WriteFile(filepath.Join(dir, step.made), nil, 0o600))
		r, err := findRelease(dir)
		if step.lacks != "" {
			if err == nil || !strings.Contains(err.Error(), step.lacks) {
				t.Errorf("with %s: %v, want that %s is missing", step.made, err, step.lacks)
			}
			continue
		}
		want := []string{filepath.Join(dir, "oxide-csi-plugin.oci.tar"),
			filepath.Join(dir, "oxide-csi-plugin-node.oci.tar"),
			filepath.Join(dir, "oxide-node-keeper.oci.tar")}
		if err != nil || r.chart != filepath.Join(dir, "oxide-csi-driver-1.2.3.tgz") ||
			!slices.Equal(r.archives, want) {
			t.Errorf("found %+v, %v", r, err)
		}
	}
}
