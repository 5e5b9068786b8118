package deploy_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
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

// values writes a file of values, and returns Helm's arguments for it.
func values(t *testing.T, text string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return []string{"--values", file}
}

type output struct {
	text, complaints string
	err              error
}

var templates = map[string]output{}

// helm returns the output of `helm template` on the chart. It caches the output by the arguments,
// which name every API server and every file of values.
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

// build returns what `kubectl apply -k` would apply, from the embedded files.
func build(t *testing.T, dir string) manifests {
	t.Helper()
	return buildWith(t, dir, nil)
}

// buildWith does what build does, with files added as a user adds them.
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

func key(object *unstructured.Unstructured) string {
	return object.GetKind() + "/" + object.GetNamespace() + "/" + object.GetName()
}

// lines returns every field of the objects as KIND/NAME.PATH: VALUE, in order. An item of a list
// has its name, or its index if it has none. The order of plain values in a list does not count.
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
			text, _ := json.Marshal(part) // it came from JSON
			all = append(all, at+": "+string(text))
		}
	}
	for _, o := range m {
		walk(o.GetKind()+"/"+o.GetName(), o.Object)
	}
	slices.Sort(all)
	return all
}

// differences returns the lines that are only in a, behind a minus, and those that are only in b,
// behind a plus. For an object that is only in a, it returns the name alone.
func differences(a, b []string) string {
	var found []string
	gone := "\n" // the prefix of the lines of the last object that is missing in b
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

// toolsModule is the flag that takes the programs of these tests from a module of their own, so
// that the driver's module does not depend on them.
const toolsModule = "-modfile=../tools/go.mod"

// tool returns the path of a program of the tools' module. It builds the program unless that was
// done by make or an earlier call.
func tool(t *testing.T, name string) string {
	t.Helper()
	if made := madeBeside(name); made != "" {
		return made
	}
	// With the same flags as make, so that Go finds the program in its cache.
	out, complaints, err := run(t, nil, "env", "CGO_ENABLED=0", "GOFLAGS=-trimpath",
		"go", "tool", toolsModule, "-n", name)
	if err != nil {
		t.Fatalf("build the tool %s: %v\n%s", name, err, complaints)
	}
	return strings.TrimSpace(out)
}

// program returns the path of one of our programs: the one that make built beside the driver, or
// one that is built here.
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

// madeBeside returns the path of a program that make built beside the driver, or "".
func madeBeside(name string) string {
	path := filepath.Join(filepath.Dir(os.Getenv("OXIDE_CSI_PLUGIN")), name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// run runs a program and returns its output. The error is its exit status.
func run(t *testing.T, input []byte, name string, args ...string) (stdout, stderr string,
	err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &complaints
	cmd.Env = append(cmd.Environ(), "GOGC=400") // most programs end before they need a collection
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

// controllersPod returns the pod of the controller, and the container of the driver in it.
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
