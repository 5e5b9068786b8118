package deploy_test

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

// kubernetes is the version for which the plain manifests are rendered and checked.
const kubernetes = "1.35.4"

// with returns --set arguments.
func with(values ...string) []string {
	var args []string
	for _, v := range values {
		args = append(args, "--set", v)
	}
	return args
}

// values writes a file of values, and returns the arguments that name it.
func values(t *testing.T, text string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return []string{"--values", file}
}

// output is what a program wrote, and its exit status.
type output struct {
	text, complaints string
	err              error
}

// templates contains the output of each `helm template`, by its arguments.
var templates = map[string]output{}

// helm runs `helm template` on the chart, unless it was run with these arguments before. Every
// cluster and every file of values has a name of its own in the arguments.
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

// source matches the line that helm writes before each document.
var source = regexp.MustCompile(`^# Source: [^/]+/templates/(.+)\n`)

// render returns what the chart renders with the values, by the name of the template.
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
			t.Fatalf("helm template says not where this is from:\n%s", document)
		}
		if files[head[1]] != "" {
			files[head[1]] += "---\n"
		}
		files[head[1]] += document[len(head[0]):]
	}
	return files
}

// objects returns the objects that the chart renders with the values.
func objects(t *testing.T, args ...string) manifests {
	t.Helper()
	files := render(t, args...)
	var all manifests
	for _, text := range files {
		all = append(all, parse(t, text)...)
	}
	return all
}

// build returns what `kubectl apply -k` would apply, from the embedded files.
func build(t *testing.T, dir string) manifests {
	t.Helper()
	return buildWith(t, dir, nil)
}

// buildWith is build with further files, as a user adds them.
func buildWith(t *testing.T, dir string, files map[string]string) manifests {
	t.Helper()
	memory := filesys.MakeFsInMemory()
	err := fs.WalkDir(deploy.Files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := deploy.Files.ReadFile(name)
		if err != nil {
			return err
		}
		return memory.WriteFile(path.Join("/", name), content)
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		if err := memory.WriteFile(path.Join("/", name), []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(memory, path.Join("/", dir))
	if err != nil {
		t.Fatalf("kustomize build %s: %v", dir, err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text))
}

// manifests contains the objects of one form.
type manifests []*unstructured.Unstructured

func parse(t *testing.T, text string) manifests {
	t.Helper()
	var all manifests
	for document := range strings.SplitSeq("\n"+text, "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			t.Fatalf("%v in:\n%s", err, document)
		}
		if len(object.Object) > 0 {
			all = append(all, object)
		}
	}
	return all
}

// key returns a string that identifies an object.
func key(object *unstructured.Unstructured) string {
	return object.GetKind() + "/" + object.GetNamespace() + "/" + object.GetName()
}

// byKey indexes the objects. It fails if two have the same key.
func (m manifests) byKey(t *testing.T) map[string]map[string]any {
	t.Helper()
	all := map[string]map[string]any{}
	for _, object := range m {
		if all[key(object)] != nil {
			t.Errorf("%s is there twice", key(object))
		}
		all[key(object)] = object.Object
	}
	return all
}

// find returns the object of that kind and name as a typed one. A field that the type does not have
// is an error.
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

// kinds returns all objects of a kind.
func (m manifests) kinds(kind string) manifests {
	var found manifests
	for _, object := range m {
		if object.GetKind() == kind {
			found = append(found, object)
		}
	}
	return found
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	content, err := deploy.Files.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
