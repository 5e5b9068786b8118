package main

import (
	"fmt"
	"path/filepath"
)

// release is a folder that make release has written.
type release struct {
	// chart is the file of the Helm chart, and archives are the images that it uses.
	chart    string
	archives []string
}

// findRelease finds in a folder the files of an installation.
func findRelease(dir string) (release, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return release{}, fmt.Errorf("find the release: %w", err)
	}
	charts, err := filepath.Glob(filepath.Join(dir, "oxide-csi-driver-*.tgz"))
	if err != nil || len(charts) != 1 {
		return release{}, fmt.Errorf("expected one chart oxide-csi-driver-VERSION.tgz in %s, and found "+
			"%q: make the release with make release VERSION=…", dir, charts)
	}
	r := release{chart: charts[0]}
	for _, image := range []string{"oxide-csi-plugin", "oxide-csi-plugin-node", "oxide-node-keeper"} {
		archives, err := filepath.Glob(filepath.Join(dir, image+".oci.tar"))
		if err != nil || len(archives) != 1 {
			return release{}, fmt.Errorf("expected the image %s.oci.tar in %s, and found none: make the "+
				"release without IMAGES=", image, dir)
		}
		r.archives = append(r.archives, archives...)
	}
	return r, nil
}
