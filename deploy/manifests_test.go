package deploy_test

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// update makes the tests write the files that they would compare; `make manifests` sets it.
var update = flag.Bool("update", false, "write the rendered manifests instead of comparing them")

const renderedHead = "# Rendered from deploy/chart; change that, and run `make manifests`.\n"

// carried describes the content of each file, with its requirements. A reviewer of a changed file
// finds here what the file has to keep.
var carried = map[string]string{
	"base/controller.yaml": "the controller " +
		"(D-8, D-10, D-11, D-41, D-43, D-44, D-46, D-47, D-48, D-49, B-46)",
	"base/node.yaml":                    "the node (D-9, D-11, D-49, D-50, D-51, D-53, B-19)",
	"base/csidriver.yaml":               "what Kubernetes knows of the driver (D-55, B-47)",
	"base/storageclass.yaml":            "the storage class (D-56, D-60, EX-1)",
	"base/rbac-controller.yaml":         "the controller's rights (D-54)",
	"snapshots/csi-snapshotter.yaml":    "the snapshotter (D-46)",
	"node-keeper/rbac-node-keeper.yaml": "the node keeper's rights (D-54)",
	"node-keeper/rbac-leave.yaml":       "the rights of the container leave (D-54)",
}

func TestThePlainManifestsAreTheChartRendered(t *testing.T) { // D-57
	plain := render(t, with("snapshots.enabled=false")...)
	snapshots := render(t, with("snapshots.enabled=true")...)
	files := map[string]string{}
	for name, text := range snapshots {
		switch {
		case plain[name] == "":
			files["snapshots/"+name] = text
		case name != "controller.yaml" && plain[name] != text:
			t.Errorf("%s changes with snapshots, and kustomize/snapshots cannot change it", name)
		}
	}
	for name, text := range render(t, with("snapshots.enabled=false", "nodeKeeper.enabled=true")...) {
		switch {
		case plain[name] == "":
			files["node-keeper/"+name] = text
		case name != "controller.yaml" && name != "node.yaml" && plain[name] != text:
			t.Errorf("%s changes with a node keeper, and kustomize/node-keeper does not change it",
				name)
		}
	}
	for name, text := range plain {
		files["base/"+name] = text
	}
	files["snapshots/csi-snapshotter.yaml"] = sidecarPatch(t, snapshots["controller.yaml"])
	for name, text := range files {
		t.Run(cmp.Or(carried[name], name), func(t *testing.T) {
			file := filepath.Join("kustomize", name)
			if *update {
				if err := os.WriteFile(file, []byte(renderedHead+text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := os.ReadFile(file)
			if diff := gocmp.Diff(renderedHead+text, string(got)); diff != "" {
				t.Errorf("%s is not what the chart makes (-chart +file); run `make manifests`: %v\n%s", file,
					err, diff)
			}
		})
	}
	handWritten := []string{"base/kustomization.yaml", "base/namespace.yaml",
		"snapshots/kustomization.yaml", "node-keeper/kustomization.yaml",
		"node-keeper/controller-tolerations.yaml", "node-keeper/node-leave.yaml",
		"node-keeper/node-registrar.yaml"}
	for _, dir := range []string{"base", "snapshots", "node-keeper"} {
		entries, err := os.ReadDir(filepath.Join("kustomize", dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			name := dir + "/" + entry.Name()
			if files[name] == "" && !slices.Contains(handWritten, name) {
				t.Errorf("kustomize/%s is left over: the chart makes no such file", name)
			}
		}
	}
}

// sidecarPatch returns the patch that adds the snapshotter: the last container of the chart's
// Deployment, with its comments.
func sidecarPatch(t *testing.T, controller string) string {
	t.Helper()
	_, rest, ok := strings.Cut(controller, "        - name: csi-snapshotter\n")
	container, _, ok2 := strings.Cut(rest, "\n      volumes:\n")
	if !ok || !ok2 {
		t.Fatal("the chart's Deployment has not the csi-snapshotter as its last container")
	}
	var patch strings.Builder
	patch.WriteString("- op: add\n  path: /spec/template/spec/containers/-\n  value:\n" +
		"    name: csi-snapshotter\n")
	for line := range strings.SplitSeq(container, "\n") {
		patch.WriteString("    " + strings.TrimPrefix(line, "          ") + "\n")
	}
	return patch.String()
}

// components lists kustomize's components, with the chart's values that have the same effect. A
// kustomization can use only one component of each option.
var components = []struct {
	name, option string
	values       []string
}{
	{"own-ca", "own-ca", []string{"ownCA=true"}},
	{"node-keeper", "node-keeper", []string{"nodeKeeper.enabled=true"}},
	{"instance-metadata/file", "instance-metadata", []string{"instanceMetadata.enabled=true"}},
	{"instance-metadata/env", "instance-metadata", []string{"instanceMetadata.enabled=true",
		"instanceMetadata.via=env"}},
}

func TestComponentsInAnyOrderHaveTheEffectOfTheChartsValues(t *testing.T) {
	var subsets [][]int
	for bits := range 1 << len(components) {
		var subset []int
		options := map[string]bool{}
		for i, c := range components {
			if bits&(1<<i) != 0 && !options[c.option] {
				subset, options[c.option] = append(subset, i), true
			}
		}
		if !slices.ContainsFunc(subsets, func(s []int) bool { return slices.Equal(s, subset) }) {
			subsets = append(subsets, subset)
		}
	}
	if len(subsets) != 12 {
		t.Errorf("%d subsets, want 12: the generator is wrong, or a component is new", len(subsets))
	}
	subsets = short.Some(t, 3, subsets)
	for base, snapshots := range map[string]string{"base": "false", "snapshots": "true"} {
		without := build(t, "kustomize/"+base).lines()
		for _, subset := range subsets {
			values := []string{"snapshots.enabled=" + snapshots}
			for _, i := range subset {
				values = append(values, components[i].values...)
			}
			want := objects(t, with(values...)...).lines()
			var names []string
			for _, i := range subset {
				names = append(names, "../"+components[i].name)
			}
			for range 2 { // every pair in both orders
				slices.Reverse(names)
				t.Run(base+" "+strings.Join(names, " "), func(t *testing.T) {
					all := buildWith(t, "kustomize/mine", map[string]string{
						"kustomize/mine/kustomization.yaml": "kind: Kustomization\nresources: [../" +
							base + "]\ncomponents: [" + strings.Join(names, ", ") + "]\n",
					})
					if len(names) > 0 && slices.Equal(all.lines(), without) {
						t.Error("the components change nothing")
					}
					others := slices.DeleteFunc(all, func(o *unstructured.Unstructured) bool {
						return o.GetKind() == "Namespace" // Helm creates it with --create-namespace
					})
					if len(others) != len(all)-1 {
						t.Error("the plain manifests bring no namespace")
					}
					if diff := differences(want, others.lines()); diff != "" {
						t.Errorf("kustomize and helm differ (-helm +kustomize):\n%s", diff)
					}
				})
			}
		}
	}
	entries, err := os.ReadDir("kustomize")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join("kustomize", entry.Name(), "kustomization.yaml"))
		if err == nil && strings.Contains(string(text), "\nkind: Component\n") &&
			!strings.Contains(fmt.Sprint(components), "{"+entry.Name()+" ") {
			t.Errorf("the component %s is not in the test's list", entry.Name())
		}
	}
}

func TestTheChartInstallsSnapshotSupportIfTheClusterHasItsCRDs(t *testing.T) {
	crds := []string{"--api-versions", "snapshot.storage.k8s.io/v1"}
	on, off := objects(t, with("snapshots.enabled=true")...), objects(t,
		with("snapshots.enabled=false")...)
	for name, c := range map[string][2]manifests{
		"auto without the CRDs": {objects(t), off},
		"auto with the CRDs":    {objects(t, crds...), on},
		"off with the CRDs":     {objects(t, append(with("snapshots.enabled=false"), crds...)...), off},
	} {
		if diff := differences(c[1].lines(), c[0].lines()); diff != "" || len(on) <= len(off) {
			t.Errorf("%s: (-expected +rendered):\n%s", name, diff)
		}
	}
}

func TestTheRFDsExampleIsUnchanged(t *testing.T) { // D-58, D-59
	text := string(readFile(t, "examples/rfd-595-postgres.yaml"))
	// This is the text of the RFD. Its page does not show the indentation.
	want := `apiVersion: v1
kind: PersistentVolumeClaim
metadata:
name: oxide-postgres-data
spec:
accessModes:
- ReadWriteOnce
resources:
requests:
storage: 50Gi
storageClassName: oxide-disk
---
apiVersion: v1
kind: Pod
metadata:
name: postgres
spec:
containers:
- name: postgres
image: postgres:17.6
volumeMounts:
- name: postgres-data
mountPath: /var/lib/postgresql/data
volumes:
- name: postgres-data
persistentVolumeClaim:
claimName: oxide-postgres-data
`
	var flat strings.Builder
	for line := range strings.Lines(text) {
		flat.WriteString(strings.TrimLeft(line, " "))
	}
	if flat.String() != want {
		t.Errorf("the example reads\n%swant\n%s", flat.String(), want)
	}
}

func TestPostgresUsesASubdirectoryOfItsVolume(t *testing.T) { // D-59
	all := parse(t, string(readFile(t, "examples/postgres.yaml")))
	c := find[appsv1.StatefulSet](t, all, "StatefulSet", "postgres").Spec.Template.Spec.Containers[0]
	mount, env := c.VolumeMounts[0].MountPath, map[string]corev1.EnvVar{}
	for _, v := range c.Env {
		env[v.Name] = v
	}
	if data := env["PGDATA"].Value; !strings.HasPrefix(data, mount+"/") {
		t.Errorf("PGDATA is %s: at the mount %s itself, lost+found is in initdb's way", data, mount)
	}
	password := env["POSTGRES_PASSWORD"].ValueFrom.SecretKeyRef
	if find[corev1.Secret](t, all, "Secret", password.Name).StringData[password.Key] == "" {
		t.Errorf("the password is not in %v", password)
	}
}
