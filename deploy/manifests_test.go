package deploy_test

import (
	"flag"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// update makes the tests write the files that they would compare; `make manifests` sets it.
var update = flag.Bool("update", false, "write the rendered manifests instead of comparing them")

const renderedHead = "# Rendered from deploy/chart; change that, and run `make manifests`.\n"

func TestThePlainManifestsAreTheChartRendered(t *testing.T) { // D-57
	plain := render(t, with("snapshots.enabled=false")...)
	snapshots := render(t, with("snapshots.enabled=true")...)
	files := map[string]string{}
	for name, text := range snapshots {
		switch {
		case plain[name] == "":
			files["snapshots/"+name] = text
		case name != "controller.yaml" && plain[name] != text:
			t.Errorf("%s is another one with snapshots; kustomize/snapshots could not make it so", name)
		}
	}
	for name, text := range render(t, with("snapshots.enabled=false", "nodeKeeper.enabled=true")...) {
		switch {
		case plain[name] == "":
			files["node-keeper/"+name] = text
		case name != "controller.yaml" && name != "node.yaml" && plain[name] != text:
			t.Errorf("%s is another one with a node keeper; kustomize/node-keeper does not make it so",
				name)
		}
	}
	for name, text := range plain {
		files["base/"+name] = text
	}
	files["snapshots/csi-snapshotter.yaml"] = sidecarPatch(t, snapshots["controller.yaml"])
	for name, text := range files {
		file := filepath.Join("kustomize", name)
		if *update {
			if err := os.WriteFile(file, []byte(renderedHead+text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Errorf("%v; run `make manifests`", err)
			continue
		}
		if diff := cmp.Diff(renderedHead+text, string(got)); diff != "" {
			t.Errorf("%s is not what the chart makes (-chart +file); run `make manifests`:\n%s", file, diff)
		}
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

// sidecarPatch returns the patch that adds the snapshotter, which is the last container of the
// chart's Deployment, with its comments.
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

// components lists the components of a kustomization with the values of the chart that have the
// same effect. A kustomization uses only one of those with the same option.
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
	built := 0
	for base, snapshots := range map[string]string{"base": "false", "snapshots": "true"} {
		without := unordered(build(t, "kustomize/"+base).byKey(t))
		for _, subset := range subsets {
			values := []string{"snapshots.enabled=" + snapshots}
			for _, i := range subset {
				values = append(values, components[i].values...)
			}
			want := unordered(objects(t, with(values...)...).byKey(t))
			for order := range permutations(subset) {
				var names []string
				for _, i := range order {
					names = append(names, "../"+components[i].name)
				}
				t.Run(base+" "+strings.Join(names, " "), func(t *testing.T) {
					got := unordered(buildWith(t, "kustomize/mine", map[string]string{
						"kustomize/mine/kustomization.yaml": "kind: Kustomization\nresources: [../" +
							base + "]\ncomponents: [" + strings.Join(names, ", ") + "]\n",
					}).byKey(t))
					if len(names) > 0 && cmp.Equal(got, without) {
						t.Error("the components change nothing")
					}
					if got["Namespace//oxide-csi"] == nil {
						t.Error("the plain manifests bring no namespace")
					}
					delete(got, "Namespace//oxide-csi") // Helm creates it with --create-namespace
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("kustomize and helm differ (-helm +kustomize):\n%s", diff)
					}
				})
				built++
			}
		}
	}
	if built != 2*27 && !testing.Short() {
		t.Errorf("%d kustomizations, want 54", built)
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

// permutations returns every order of the items.
func permutations(items []int) iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		if len(items) == 0 {
			yield(nil)
			return
		}
		for i, first := range items {
			rest := slices.Delete(slices.Clone(items), i, i+1)
			for tail := range permutations(rest) {
				if !yield(append([]int{first}, tail...)) {
					return
				}
			}
		}
	}
}

// unordered sorts the lists in the objects whose items have names, such as containers and volumes,
// because a patch by name does not determine the position. The init containers may run in any
// order, too: the registrar continues to run beside the others and waits for none of them.
func unordered(objects map[string]map[string]any) map[string]map[string]any {
	var sorted func(part any)
	sorted = func(part any) {
		switch part := part.(type) {
		case map[string]any:
			for _, v := range part {
				sorted(v)
			}
		case []any:
			for _, v := range part {
				sorted(v)
			}
			if named(part) != nil {
				slices.SortFunc(part, func(a, b any) int {
					return strings.Compare(fmt.Sprint(a), fmt.Sprint(b))
				})
			}
		}
	}
	for _, object := range objects {
		sorted(object)
	}
	return objects
}

func TestSnapshotsAreInstalledWhereTheClusterHasTheirKinds(t *testing.T) {
	const crds = "snapshot.storage.k8s.io/v1"
	for _, c := range []struct {
		name string
		args []string
		want bool
	}{
		{"auto without the CRDs", nil, false},
		{"auto with the CRDs", []string{"--api-versions", crds}, true},
		{"off with the CRDs", append(with("snapshots.enabled=false"), "--api-versions", crds), false},
		{"on without looking", with("snapshots.enabled=true"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := objects(t, c.args...)
			text := strings.Join(slices.Sorted(maps.Values(render(t, c.args...))), "")
			for what, got := range map[string]bool{
				"a VolumeSnapshotClass":  len(all.kinds("VolumeSnapshotClass")) == 1,
				"the snapshotter":        strings.Contains(text, "name: csi-snapshotter"),
				"rights for snapshots":   strings.Contains(text, "snapshot.storage.k8s.io"),
				"a controller that runs": len(all.kinds("Deployment")) == 1 == c.want,
			} {
				if got != c.want {
					t.Errorf("%s: got %v, want %v", what, got, c.want)
				}
			}
		})
	}
}
