package deploy_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

// The schemas of Kubernetes' kinds come from modules that contain them as data. So nothing has to
// be fetched from the places that kubeconform uses by default.
const (
	kubernetesModule = "k8s.io/kubernetes@v" + kubernetes
	snapshotsModule  = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"
)

// TestKubeconformAcceptsEveryForm checks every object strictly against the schema of its kind: a
// field that Kubernetes does not know is an error.
func TestKubeconformAcceptsEveryForm(t *testing.T) { // D-43
	schemas := allSchemas(t)
	forms := map[string]manifests{}
	for name, values := range map[string][]string{
		"the defaults":   nil,
		"with snapshots": with("snapshots.enabled=true"),
		"with all there is": with("snapshots.enabled=true", "metrics.enabled=true", "ownCA=true",
			"metrics.dashboard.enabled=true",
			"topology=rack=a", "topologyAlso=rack=b", "topologyInstance=true",
			"instanceMetadata.enabled=true", "nodeKeeper.enabled=true",
			"secret.create=true", "secret.host=https://a", "secret.token=t", "secret.project=p",
			"secret.caBundle=c", "extraStorageClasses[0].name=xfs", "storageClass.default=true",
			"extraStorageClasses[0].parameters.blockSize=512", "controller.antiAffinity=required",
			"test.enabled=true", "test.image.repository=mine", "test.image.tag=v1",
			`storageClass.allowedTopologies[0].matchLabelExpressions[0].key=`+
				`topology\.csi\.oxide\.computer/rack`,
			"storageClass.allowedTopologies[0].matchLabelExpressions[0].values={a}",
			"controller.hostNetwork=true", "controller.dnsPolicy=None",
			"controller.dnsConfig.nameservers={192.0.2.53}", "snapshots.classes[0].name=velero",
			"imagePullSecrets[0].name=pull", "node.extraEnv[0].name=A", "node.extraEnv[0].value=b"),
		"with further containers":    append(everything(), values(t, extras)...),
		"with policies and an audit": append(append(audited(), policed()...), everything()...),
		"with the id as a variable":  with("instanceMetadata.enabled=true", "instanceMetadata.via=env"),
	} {
		forms["chart "+name] = objects(t, values...)
	}
	for _, dir := range []string{"base", "snapshots", "snapshot-controller", "simulator", "e2e"} {
		forms["kustomize "+dir] = build(t, "kustomize/"+dir)
	}
	examples, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(examples) == 0 {
		t.Fatalf("found no examples: %v", err)
	}
	for _, file := range examples {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		forms[file] = parse(t, string(text))
	}
	for name, all := range forms {
		t.Run(name, func(t *testing.T) {
			if out, ok := conforms(t, schemas, all); !ok {
				t.Error(out)
			}
		})
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
func conforms(t *testing.T, schemas kindSchemas, all manifests) (complaints string, ok bool) {
	t.Helper()
	dir := t.TempDir()
	var stream strings.Builder
	for _, object := range all {
		schemas.write(t, dir, object.GroupVersionKind())
		text, err := yaml.Marshal(object.Object)
		if err != nil {
			t.Fatal(err)
		}
		stream.WriteString("---\n" + string(text))
	}
	out, complaints, err := run(t, []byte(stream.String()), tool(t, "kubeconform"), "-strict",
		"-summary", "-schema-location",
		dir+"/{{.Group}}/{{.ResourceAPIVersion}}/{{.ResourceKind}}.json")
	if !strings.Contains(out, fmt.Sprintf("%d resource", len(all))) {
		t.Errorf("kubeconform has not seen the %d objects: %s%s", len(all), out, complaints)
	}
	return out + complaints, err == nil
}

// kindSchemas contains functions that return the JSON schema of a kind.
type kindSchemas map[schema.GroupVersionKind]func() map[string]any

var allKinds = kindSchemas{}

func allSchemas(t *testing.T) kindSchemas {
	t.Helper()
	if len(allKinds) == 0 {
		kubernetesKinds(t, allKinds)
		snapshotKinds(t, allKinds)
	}
	return allKinds
}

// module returns the directory of a module, and downloads it if necessary. The project does not
// depend on it.
func module(t *testing.T, name string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", name)
	cmd.Dir = t.TempDir() // outside of any module, whose go.sum would apply
	out, complaints, err := finish(t, cmd, nil)
	var found struct{ Dir string }
	if err == nil {
		err = json.Unmarshal([]byte(out), &found)
	}
	if err != nil || found.Dir == "" {
		t.Fatalf("download the module %s, which brings the schemas: %v\n%s%s", name, err, out, complaints)
	}
	return found.Dir
}

// kubernetesKinds adds the schemas of the kinds in Kubernetes' own OpenAPI document.
func kubernetesKinds(t *testing.T, schemas kindSchemas) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(module(t, kubernetesModule), "api", "openapi-spec",
		"swagger.json"))
	if err != nil {
		t.Fatal(err)
	}
	var document struct{ Definitions map[string]map[string]any }
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	definitions := document.Definitions
	for _, definition := range definitions {
		closed(definition)
	}
	// These are written as strings or as numbers, but described as strings.
	definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = map[string]any{
		"type": []string{"integer", "string"}}
	definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = map[string]any{
		"type": []string{"number", "string"}}
	for name, definition := range definitions {
		kind := groupVersionKind(definition)
		if kind.Kind == "" {
			continue
		}
		schemas[kind] = func() map[string]any {
			needed := map[string]any{}
			collect(name, definitions, needed)
			return map[string]any{"$ref": "#/definitions/" + name, "definitions": needed}
		}
	}
	if kinds := len(schemas); kinds < 100 {
		t.Fatalf("found %d kinds in Kubernetes' OpenAPI document, expected more than 100", kinds)
	}
}

// groupVersionKind returns the kind that a definition describes. Most definitions are parts of
// others, or belong to many groups.
func groupVersionKind(definition map[string]any) (found schema.GroupVersionKind) {
	all, _ := definition["x-kubernetes-group-version-kind"].([]any)
	if len(all) != 1 {
		return found
	}
	only, _ := all[0].(map[string]any)
	found.Group, _ = only["group"].(string)
	found.Version, _ = only["version"].(string)
	found.Kind, _ = only["kind"].(string)
	return found
}

// closed makes a schema refuse fields that it does not describe, at any depth.
func closed(schema map[string]any) {
	_, fields := schema["properties"].(map[string]any)
	_, others := schema["additionalProperties"]
	if fields && !others && schema["x-kubernetes-preserve-unknown-fields"] != true {
		schema["additionalProperties"] = false
	}
	for _, part := range schema {
		switch part := part.(type) {
		case map[string]any:
			for _, deeper := range part {
				if deeper, ok := deeper.(map[string]any); ok {
					closed(deeper)
				}
			}
			closed(part)
		case []any:
			for _, deeper := range part {
				if deeper, ok := deeper.(map[string]any); ok {
					closed(deeper)
				}
			}
		}
	}
}

// collect gathers the definitions on which one depends.
func collect(name string, definitions map[string]map[string]any, needed map[string]any) {
	if needed[name] != nil || definitions[name] == nil {
		return
	}
	needed[name] = definitions[name]
	var walk func(any)
	walk = func(part any) {
		switch part := part.(type) {
		case map[string]any:
			for k, deeper := range part {
				if text, ok := deeper.(string); ok && k == "$ref" {
					collect(strings.TrimPrefix(text, "#/definitions/"), definitions, needed)
				}
				walk(deeper)
			}
		case []any:
			for _, deeper := range part {
				walk(deeper)
			}
		}
	}
	walk(definitions[name])
}

// snapshotKinds adds the schemas of the snapshot CRDs.
func snapshotKinds(t *testing.T, schemas kindSchemas) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(module(t, snapshotsModule), "config", "crd",
		"snapshot.storage.k8s.io_*.yaml"))
	if err != nil || len(files) != 3 {
		t.Fatalf("found the snapshot CRDs %q, expected three: %v", files, err)
	}
	for _, file := range slices.Sorted(slices.Values(files)) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Group    string
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct {
						OpenAPIV3Schema map[string]any `json:"openAPIV3Schema"`
					}
				}
			}
		}
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatal(err)
		}
		for _, version := range crd.Spec.Versions {
			open := version.Schema.OpenAPIV3Schema
			closed(open)
			schemas[schema.GroupVersionKind{Group: crd.Spec.Group, Version: version.Name,
				Kind: crd.Spec.Names.Kind}] = func() map[string]any { return open }
		}
	}
}

// write writes the schema of a kind, if there is one, below a directory as group/version/kind.json.
func (schemas kindSchemas) write(t *testing.T, dir string, kind schema.GroupVersionKind) {
	t.Helper()
	group := cmp.Or(kind.Group, kind.Version) // kubeconform's name for the group without a name
	at := filepath.Join(dir, group, kind.Version)
	file := filepath.Join(at, strings.ToLower(kind.Kind)+".json")
	if _, err := os.Stat(file); err == nil || schemas[kind] == nil {
		return
	}
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(schemas[kind]())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestTheSnapshottersVersionsKnowTheirFeatureGates finds a version that has removed a gate. Given
// an unknown gate, both programs end with an error.
func TestTheSnapshottersVersionsKnowTheirFeatureGates(t *testing.T) {
	checked := 0
	all := append(objects(t, with("snapshots.enabled=true")...),
		build(t, "kustomize/snapshot-controller")...)
	for _, d := range all.kinds("Deployment") {
		for _, c := range find[appsv1.Deployment](t, all, "Deployment",
			d.GetName()).Spec.Template.Spec.Containers {
			for _, arg := range c.Args {
				gates, ok := strings.CutPrefix(arg, "--feature-gates=")
				if !ok {
					continue
				}
				_, tag, _ := strings.Cut(c.Image, ":")
				major, _, _ := strings.Cut(tag, ".")
				text, err := os.ReadFile(filepath.Join(module(t, "github.com/kubernetes-csi/"+
					"external-snapshotter/"+major+"@"+tag), "pkg", "features", "features.go"))
				if err != nil {
					t.Fatal(err)
				}
				for gate := range strings.SplitSeq(gates, ",") {
					name, _, _ := strings.Cut(gate, "=")
					if !strings.Contains(string(text), `= "`+name+`"`) {
						t.Errorf("%s has %s, and %s does not know it", c.Name, arg, c.Image)
					}
					checked++
				}
			}
		}
	}
	if checked != 2 {
		t.Errorf("%d feature gates were compared, want one of csi-snapshotter and of snapshot-controller",
			checked)
	}
}
