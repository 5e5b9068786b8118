package deploy_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

// kubernetes is the version for which the plain manifests are rendered and checked.
const kubernetes = "1.35.4"

func with(values ...string) []string {
	var args []string
	for _, v := range values {
		args = append(args, "--set", v)
	}
	return args
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func values(t *testing.T, text string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(file, []byte(text), 0o644))
	return []string{"--values", file}
}

type output struct {
	text, complaints string
	err              error
}

var templates = map[string]output{}

// helm returns the output of `helm template` on the chart. It caches the output for each list of
// arguments, so a test that changes the API server or a values file has to use another URL or path.
func helm(t *testing.T, args ...string) (text, complaints string, err error) {
	t.Helper()
	name := fmt.Sprintf("%q", args)
	o, ok := templates[name]
	if !ok {
		all := append([]string{"template", "oxide-csi", "chart", "--namespace", "oxide-csi",
			"--kube-version", kubernetes}, args...)
		o.text, o.complaints, o.err = run(t, nil, tool(t, "helm"), all...)
		templates[name] = o
	}
	return o.text, o.complaints, o.err
}

var source = regexp.MustCompile(`^# Source: [^/]+/templates/(.+)\n`)

// render returns the rendered templates by file name.
func render(t *testing.T, args ...string) map[string]string {
	t.Helper()
	text, complaints, err := helm(t, args...)
	if err != nil {
		t.Fatalf("helm template %q: %v\n%s", args, err, complaints)
	}
	files := map[string]string{}
	for document := range strings.SplitSeq(text, "---\n") {
		if strings.TrimSpace(document) == "" {
			continue
		}
		head := source.FindStringSubmatch(document)
		if head == nil {
			t.Fatalf("helm template does not name the template of:\n%s", document)
		}
		if files[head[1]] != "" {
			files[head[1]] += "---\n"
		}
		files[head[1]] += document[len(head[0]):]
	}
	return files
}

func objects(t *testing.T, args ...string) manifests {
	t.Helper()
	files := render(t, args...)
	var all manifests
	for _, text := range files {
		all = append(all, parse(t, text)...)
	}
	return all
}

func build(t *testing.T, dir string, files map[string]string) manifests {
	t.Helper()
	all, err := deploy.Build(deploy.Files, dir, files)
	must(t, err)
	return all
}

type manifests []*unstructured.Unstructured

func parse(t *testing.T, text string) manifests {
	t.Helper()
	all, err := deploy.Parse([]byte(text))
	must(t, err)
	return all
}

func key(object *unstructured.Unstructured) string {
	return object.GetKind() + "/" + object.GetNamespace() + "/" + object.GetName()
}

// lines() returns all fields, sorted, as KIND/NAME.PATH: VALUE. In the path, a list's item is
// [NAME] if it is a mapping with a name, [INDEX] if another mapping, and otherwise [].
func (m manifests) lines() []string {
	var all []string
	var walk func(at string, part any)
	walk = func(at string, part any) {
		parts, _ := part.(map[string]any)
		for k, v := range parts {
			walk(at+"."+k, v)
		}
		items, _ := part.([]any)
		for i, item := range items {
			fields, isMapping := item.(map[string]any)
			name, ok := fields["name"].(string)
			switch {
			case !isMapping:
				name = ""
			case !ok:
				name = strconv.Itoa(i)
			}
			walk(at+"["+name+"]", item)
		}
		if len(parts)+len(items) == 0 {
			text, _ := json.Marshal(part) // it was decoded from JSON, so it can be encoded
			all = append(all, at+": "+string(text))
		}
	}
	for _, o := range m {
		walk(o.GetKind()+"/"+o.GetName(), o.Object)
	}
	slices.Sort(all)
	return all
}

// differences() returns the lines that are only in a, each after a minus, and the lines that are
// only in b, each after a plus. For an object that b lacks, it returns only the object's name.
func differences(a, b []string) string {
	var found []string
	gone := "\n" // this prefix begins the lines of the last object that b lacks
	for _, line := range a {
		kind, _, _ := strings.Cut(line, "/")
		object, ok := strings.CutSuffix(line, ".kind: "+strconv.Quote(kind))
		if ok && !slices.Contains(b, line) {
			gone = object + "."
			found = slices.DeleteFunc(found, func(f string) bool { return strings.HasPrefix(f[1:], gone) })
			found = append(found, "-"+object+"\n")
		} else if !slices.Contains(b, line) && !strings.HasPrefix(line, gone) {
			found = append(found, "-"+line+"\n")
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			found = append(found, "+"+line+"\n")
		}
	}
	slices.SortFunc(found, func(x, y string) int {
		return cmp.Or(strings.Compare(x[1:], y[1:]), strings.Compare(x, y))
	})
	return strings.Join(found, "")
}

// find returns the object with this kind and name as a T. It fails the test if the object has a
// field that T lacks.
func find[T any](t *testing.T, m manifests, kind, name string) *T {
	t.Helper()
	i := slices.IndexFunc(m, func(o *unstructured.Unstructured) bool {
		return o.GetKind() == kind && o.GetName() == name
	})
	if i < 0 {
		t.Fatalf("there is no %s %s", kind, name)
	}
	typed := new(T)
	err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(m[i].Object, typed,
		true)
	if err != nil {
		t.Fatalf("%s %s: %v", kind, name, err)
	}
	return typed
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	content, err := deploy.Files.ReadFile(name)
	must(t, err)
	return content
}

// toolsModule makes Go build the tests' programs, such as helm, from tools/go.mod, so that the
// driver's go.mod does not need them.
const toolsModule = "-modfile=../tools/go.mod"

func tool(t *testing.T, name string) string {
	t.Helper()
	if made := madeBeside(name); made != "" {
		return made
	}
	// The Makefile uses the same flags, so Go finds the program in its cache.
	out, complaints, err := run(t, nil, "env", "CGO_ENABLED=0", "GOFLAGS=-trimpath",
		"go", "tool", toolsModule, "-n", name)
	if err != nil {
		t.Fatalf("build the tool %s: %v\n%s", name, err, complaints)
	}
	return strings.TrimSpace(out)
}

func program(t *testing.T, name string) string {
	t.Helper()
	if made := madeBeside(name); made != "" {
		return made
	}
	built := filepath.Join(t.TempDir(), name)
	if out, complaints, err := run(t, nil, "go", "build", "-o", built, "../cmd/"+name); err != nil {
		t.Fatalf("build %s: %v\n%s%s", name, err, out, complaints)
	}
	return built
}

// madeBeside returns the path of a program that `make` has built beside the driver, or "".
func madeBeside(name string) string {
	path := filepath.Join(filepath.Dir(os.Getenv("OXIDE_CSI_PLUGIN")), name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// run runs a program and returns its output. If the program fails, err is its exit status.
func run(t *testing.T, input []byte, name string, args ...string) (stdout, stderr string,
	err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &complaints
	cmd.Env = append(cmd.Environ(), "GOGC=400") // less garbage collection, because programs end soon
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", cmd.Path, err)
	}
	return out.String(), complaints.String(), err
}

const (
	controllerName = "oxide-csi-controller"
	pluginName     = "oxide-plugin"
)

func controllersPod(t *testing.T, all manifests) (corev1.PodTemplateSpec, corev1.Container) {
	t.Helper()
	pod := find[appsv1.Deployment](t, all, "Deployment", controllerName).Spec.Template
	for _, c := range pod.Spec.Containers {
		if c.Name == pluginName {
			return pod, c
		}
	}
	t.Fatalf("there is no container %s", pluginName)
	return pod, corev1.Container{}
}

// kubernetesModule and snapshotsModule contain the JSON schemas of Kubernetes' kinds and of
// snapshots. Without these modules kubeconform would download schemas from web sites.
const (
	kubernetesModule = "k8s.io/kubernetes@v" + kubernetes
	snapshotsModule  = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"
)

func TestKubeconformRefusesAnInvalidManifest(t *testing.T) {
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

func conforms(t *testing.T, schemas string, all manifests) (complaints string, ok bool) {
	t.Helper()
	var stream strings.Builder
	for _, object := range all {
		text, err := yaml.Marshal(object.Object)
		must(t, err)
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

func module(t *testing.T, name string) string {
	t.Helper()
	// Go reads no go.sum in an empty directory, so the driver's go.sum need not have this module.
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

// allSchemas returns a directory with the JSON schemas of all kinds, as GROUP/VERSION/KIND.json.
// The schemas are from Kubernetes' OpenAPI document and from the snapshot CRDs.
func allSchemas(t *testing.T) string {
	t.Helper()
	dir, kinds := t.TempDir(), 0
	write := func(content any, path ...string) {
		file := filepath.Join(append([]string{dir}, path...)...)
		text, err := json.Marshal(content)
		must(t, err)
		must(t, os.MkdirAll(filepath.Dir(file), 0o755))
		must(t, os.WriteFile(file, text, 0o644))
	}
	kind := func(group, version, kind string, content any) {
		kinds++
		// The core group has no name, so kubeconform uses its version as the group.
		write(content, cmp.Or(group, version), version, strings.ToLower(kind)+".json")
	}
	read := func(file string, into any) {
		text, err := os.ReadFile(file)
		must(t, err)
		must(t, yaml.Unmarshal(text, into))
	}
	var document struct{ Definitions map[string]any }
	read(filepath.Join(module(t, kubernetesModule), "api", "openapi-spec", "swagger.json"), &document)
	definitions := document.Definitions
	closed(definitions)
	// The OpenAPI document describes these two types as strings, but Kubernetes accepts numbers, too.
	definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = map[string]any{
		"type": []string{"integer", "string"}}
	definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = map[string]any{
		"type": []string{"number", "string"}}
	write(map[string]any{"definitions": definitions}, "all.json")
	for name, d := range definitions {
		of, _ := d.(map[string]any)["x-kubernetes-group-version-kind"].([]any)
		if len(of) == 1 { // the other definitions are no kinds, or belong to many groups
			one := of[0].(map[string]any)
			kind(one["group"].(string), one["version"].(string), one["kind"].(string), map[string]any{
				"$ref": "file://" + dir + "/all.json#/definitions/" + name})
		}
	}
	files, _ := filepath.Glob(filepath.Join(module(t, snapshotsModule), "config", "crd",
		"snapshot.storage.k8s.io_*.yaml"))
	for _, file := range files {
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

// closed() changes schemas, at any depth, so that they refuse fields that they do not describe.
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
