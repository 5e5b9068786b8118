package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// chartName is the name in Chart.yaml.
const chartName = "oxide-csi-driver"

// kustomizations has the directories that are rendered, and the file that each becomes.
var kustomizations = map[string]string{
	"base":                chartName + ".yaml",
	"snapshots":           chartName + "-snapshots.yaml",
	"snapshot-controller": "snapshot-controller.yaml",
	"simulator":           "oxide-simulator.yaml",
}

// jobs contains Nomad's jobs, by the names of their files in the release.
var jobs = map[string]string{
	"controller.nomad.hcl": chartName + "-controller.nomad.hcl",
	"node.nomad.hcl":       chartName + "-node.nomad.hcl",
}

// chart packages the chart as a file, and in the form in which registries store it.
func (r *release) chart(ctx context.Context) error {
	version := r.Version[1:] // SemVer has no v
	_, err := r.output(ctx, "go", "tool", "-modfile=tools/go.mod", "helm", "package", "deploy/chart",
		"--version", version, "--app-version", r.Version, "--destination", r.stage)
	if err != nil {
		return err
	}
	name := chartName + "-" + version
	packed, err := os.Open(filepath.Join(r.stage, name+".tgz"))
	if err != nil {
		return err
	}
	defer packed.Close()
	archive, err := repack(packed, r.date)
	if err != nil {
		return err
	}
	if err := r.write(name+".tgz", archive); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(r.Root, "deploy", "chart", "Chart.yaml"))
	if err != nil {
		return err
	}
	return r.chartLayout(text, archive, version)
}

// chartLayout writes the chart as `helm push` sends it to a registry, but without the time of the
// push.
func (r *release) chartLayout(chartYAML, archive []byte, version string) error {
	var chart map[string]any
	if err := yaml.Unmarshal(chartYAML, &chart); err != nil {
		return err
	}
	chart["version"], chart["appVersion"] = version, r.Version
	config, err := json.Marshal(chart)
	if err != nil {
		return err
	}
	l, err := newLayout(filepath.Join(r.stage, chartName))
	if err != nil {
		return err
	}
	manifest := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageManifest,
		Annotations: map[string]string{
			ocispec.AnnotationTitle:    chartName,
			ocispec.AnnotationVersion:  version,
			ocispec.AnnotationLicenses: license,
			ocispec.AnnotationSource:   project,
			ocispec.AnnotationRevision: r.revision,
		},
	}
	manifest.Config, err = l.add("application/vnd.cncf.helm.config.v1+json", config)
	if err != nil {
		return err
	}
	content, err := l.add("application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)
	if err != nil {
		return err
	}
	manifest.Layers = []ocispec.Descriptor{content}
	root, err := l.addJSON(manifest.MediaType, manifest)
	if err != nil {
		return err
	}
	return r.writeLayout(l, chartName, version, root)
}

// manifests renders the kustomizations and copies Nomad's jobs, with the version's images.
func (r *release) manifests(context.Context) error {
	deploy := filepath.Join(r.Root, "deploy")
	for dir, name := range kustomizations {
		built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).
			Run(filesys.MakeFsOnDisk(), filepath.Join(deploy, "kustomize", dir))
		if err != nil {
			return fmt.Errorf("kustomize build deploy/kustomize/%s: %w", dir, err)
		}
		text, err := built.AsYaml()
		if err != nil {
			return err
		}
		head := fmt.Sprintf("# %s, built from deploy/kustomize/%s\n", r.Version, dir)
		if err := r.writePinned(name, append([]byte(head), text...)); err != nil {
			return err
		}
	}
	for from, name := range jobs {
		text, err := os.ReadFile(filepath.Join(deploy, "nomad", from))
		if err != nil {
			return err
		}
		if err := r.writePinned(name, text); err != nil {
			return err
		}
	}
	return nil
}

// ours matches the name of an image of the project, and its tag.
var ours = regexp.MustCompile(`\boxidecomputer/([a-z0-9-]+):([\w.-]+)`)

// writePinned writes a text in which our images have the version as their tag.
func (r *release) writePinned(name string, text []byte) error {
	for _, m := range ours.FindAllSubmatch(text, -1) {
		if !r.builds(string(m[1])) {
			return fmt.Errorf("%s names the image %s, which no target of the Dockerfile has as its "+
				"title", name, m[0])
		}
	}
	return r.write(name, bytes.TrimLeft(ours.ReplaceAll(text,
		[]byte("oxidecomputer/${1}:"+r.Version)), "\n"))
}
