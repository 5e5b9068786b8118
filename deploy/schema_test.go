package deploy_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The schemas of Kubernetes' kinds come from modules that contain them as data. So nothing has to
// be fetched from the places that kubeconform uses by default.
const (
	kubernetesModule = "k8s.io/kubernetes@v" + kubernetes
	snapshotsModule  = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"
)

// TestKubeconformAcceptsEveryManifest checks every object strictly against the schema of its kind:
// an unknown field is an error. TestTheChartRendersItsValues does so with all that the chart
// renders.
func TestKubeconformAcceptsEveryManifest(t *testing.T) { // D-43
	var all manifests
	for _, dir := range []string{"base", "snapshots", "snapshot-controller", "simulator", "e2e"} {
		all = append(all, build(t, "kustomize/"+dir)...)
	}
	examples, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(examples) == 0 {
		t.Fatalf("found no examples: %v", err)
	}
	for _, file := range examples {
		all = append(all, parse(t, string(readFile(t, file)))...)
	}
	if out, ok := conforms(t, allSchemas(t), all); !ok {
		t.Error(out)
	}
}

func TestKubeconformRefusesAnUnknownField(t *testing.T) {
	schemas := allSchemas(t)
	for _, wrong := range []string{
		"kind: ServiceAccount\napiVersion: v1\nmetadata: {name: a}\nautomount: false\n",
		"kind: CSIDriver\napiVersion: storage.k8s.io/v1\nmetadata: {name: a}\nspec: {attach: true}\n",
		"kind: VolumeSnapshotClass\napiVersion: snapshot.storage.k8s.io/v1\nmetadata: {name: a}\n" +
			"driver: a\ndeletionPolicy: Keep\n",
		"kind: StorageClass\napiVersion: storage.k8s.io/v1\nmetadata: {name: a}\n",
	} {
		out, ok := conforms(t, schemas, parse(t, wrong))
		if ok || !strings.Contains(out, "Invalid: 1, Errors: 0") {
			t.Errorf("kubeconform does not refuse\n%s%s", wrong, out)
		}
	}
}

// conforms runs kubeconform on the objects and returns its findings.
func conforms(t *testing.T, schemas string, all manifests) (complaints string, ok bool) {
	t.Helper()
	var stream strings.Builder
	for _, object := range all {
		text, err := yaml.Marshal(object.Object)
		if err != nil {
			t.Fatal(err)
		}
		stream.WriteString("---\n" + string(text))
	}
	out, complaints, err := run(t, []byte(stream.String()), tool(t, "kubeconform"), "-strict",
		"-summary", "-schema-location",
		schemas+"/{{.Group}}/{{.ResourceAPIVersion}}/{{.ResourceKind}}.json")
	if !strings.Contains(out, fmt.Sprintf("%d resource", len(all))) {
		t.Errorf("kubeconform has not seen the %d objects: %s%s", len(all), out, complaints)
	}
	return out + complaints, err == nil
}

// module returns the directory of a module, and downloads it if necessary. The project does not
// depend on it.
func module(t *testing.T, name string) string {
	t.Helper()
	// In an empty directory, no module's go.sum applies.
	out, complaints, err := run(t, nil, "go", "-C", t.TempDir(), "mod", "download", "-json", name)
	var found struct{ Dir string }
	if err == nil {
		err = json.Unmarshal([]byte(out), &found)
	}
	if err != nil || found.Dir == "" {
		t.Fatalf("download the module %s, which brings the schemas: %v\n%s%s", name, err, out, complaints)
	}
	return found.Dir
}

// allSchemas returns a directory with the JSON schemas of all kinds, as GROUP/VERSION/KIND.json:
// those in Kubernetes' own OpenAPI document, and those of the snapshot CRDs.
func allSchemas(t *testing.T) string {
	t.Helper()
	dir, kinds := t.TempDir(), 0
	write := func(content any, path ...string) {
		file := filepath.Join(append([]string{dir}, path...)...)
		text, err := json.Marshal(content)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(file), 0o755)
		}
		if err == nil {
			err = os.WriteFile(file, text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	kind := func(group, version, kind string, content any) {
		kinds++
		// For the core group, which has no name, kubeconform uses the version instead.
		write(content, cmp.Or(group, version), version, strings.ToLower(kind)+".json")
	}
	read := func(file string, into any) {
		text, err := os.ReadFile(file)
		if err == nil {
			err = yaml.Unmarshal(text, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	type gvk struct{ Group, Version, Kind string }
	var document struct {
		Definitions map[string]struct {
			Kinds []gvk `json:"x-kubernetes-group-version-kind"`
		}
	}
	var whole map[string]any
	swagger := filepath.Join(module(t, kubernetesModule), "api", "openapi-spec", "swagger.json")
	read(swagger, &document)
	read(swagger, &whole)
	definitions := whole["definitions"].(map[string]any)
	closed(definitions)
	// The document describes these as strings, but numbers are valid, too.
	definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = map[string]any{
		"type": []string{"integer", "string"}}
	definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = map[string]any{
		"type": []string{"number", "string"}}
	write(map[string]any{"definitions": definitions}, "all.json")
	for name, d := range document.Definitions {
		if len(d.Kinds) == 1 { // most are parts of others, or belong to many groups
			kind(d.Kinds[0].Group, d.Kinds[0].Version, d.Kinds[0].Kind, map[string]any{
				"$ref": "file://" + dir + "/all.json#/definitions/" + name})
		}
	}
	files, _ := filepath.Glob(filepath.Join(module(t, snapshotsModule), "config", "crd",
		"snapshot.storage.k8s.io_*.yaml"))
	for _, file := range files {
		var crd struct {
			Spec struct {
				Group    string
				Names    gvk
				Versions []struct {
					Name   string
					Schema struct {
						OpenAPIV3Schema map[string]any `json:"openAPIV3Schema"`
					}
				}
			}
		}
		read(file, &crd)
		for _, version := range crd.Spec.Versions {
			closed(version.Schema.OpenAPIV3Schema)
			kind(crd.Spec.Group, version.Name, crd.Spec.Names.Kind, version.Schema.OpenAPIV3Schema)
		}
	}
	if len(files) != 3 || kinds < 100 {
		t.Fatalf("found the snapshot CRDs %q and %d kinds, expected three and more than 100", files,
			kinds)
	}
	return dir
}

// closed makes schemas refuse fields that they do not describe, at any depth.
func closed(part any) {
	switch part := part.(type) {
	case map[string]any:
		for _, deeper := range part {
			closed(deeper)
		}
		_, fields := part["properties"].(map[string]any)
		_, others := part["additionalProperties"]
		if fields && !others && part["x-kubernetes-preserve-unknown-fields"] != true {
			part["additionalProperties"] = false
		}
	case []any:
		for _, deeper := range part {
			closed(deeper)
		}
	}
}
