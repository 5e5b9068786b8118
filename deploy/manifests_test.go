package deploy_test

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

var update = flag.Bool("update", false, "write the rendered manifests instead of comparing them")

const renderedHead = "# Rendered from deploy/chart; change that, and run `make manifests`.\n"

// carried maps a file to the name of its subtest, which ends with the file's requirements.
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

func TestKustomizeFilesEqualWhatTheChartRenders(t *testing.T) { // D-57
	plain, files := render(t, with("snapshots.enabled=false")...), map[string]string{}
	for _, c := range []struct{ dir, value, patched string }{
		{"snapshots", "snapshots.enabled=true", "controller.yaml"},
		{"node-keeper", "nodeKeeper.enabled=true", "controller.yaml node.yaml"},
	} {
		for name, text := range render(t, with("snapshots.enabled=false", c.value)...) {
			switch {
			case plain[name] == "":
				files[c.dir+"/"+name] = text
			case plain[name] != text && !slices.Contains(strings.Fields(c.patched), name):
				t.Errorf("%s changes with %s, and kustomize/%s does not change it", name, c.value, c.dir)
			}
		}
	}
	for name, text := range plain {
		files["base/"+name] = text
	}
	files["snapshots/csi-snapshotter.yaml"] = sidecarPatch(t,
		render(t, with("snapshots.enabled=true")...)["controller.yaml"])
	for name, text := range files {
		t.Run(cmp.Or(carried[name], name), func(t *testing.T) {
			file := filepath.Join("kustomize", name)
			if *update {
				must(t, os.WriteFile(file, []byte(renderedHead+text), 0o644))
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
		must(t, err)
		for _, entry := range entries {
			name := dir + "/" + entry.Name()
			if files[name] == "" && !slices.Contains(handWritten, name) {
				t.Errorf("kustomize/%s is left over: the chart makes no such file", name)
			}
		}
	}
}

// sidecarPatch returns a JSON patch that adds the snapshotter's container, which has to be the last
// container of the chart's Deployment.
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

// components lists the components of deploy/kustomize with the chart's values that have the same
// effect. A kustomization can use only one component of each option.
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

func TestKustomizeComponentsRenderTheSameAsHelmValues(t *testing.T) {
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
		without := build(t, "kustomize/"+base, nil).lines()
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
					all := build(t, "kustomize/mine", map[string]string{
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
	must(t, err)
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join("kustomize", entry.Name(), "kustomization.yaml"))
		if err == nil && strings.Contains(string(text), "\nkind: Component\n") &&
			!strings.Contains(fmt.Sprint(components), "{"+entry.Name()+" ") {
			t.Errorf("the component %s is not in the test's list", entry.Name())
		}
	}
}

func TestTheExampleOfRFD595IsUnchanged(t *testing.T) { // D-58, D-59
	text := string(readFile(t, "examples/rfd-595-postgres.yaml"))
	// The RFD's page shows the manifest without indentation, so the test ignores indentation.
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

func TestNomadJobsHaveTheRequiredSettings(t *testing.T) { // D-3
	for _, c := range []struct {
		file, spec string
		want, not  []string
	}{
		{"controller.nomad.hcl", "job", []string{`.type: "service"`, `.csi_plugin.type: "controller"`,
			`.config.args[]: "--mode=controller"`, `.config.args[]: "--endpoint=unix:///csi/csi.sock"`,
			`.csi_plugin.mount_dir: "/csi"`, `.csi_plugin.id: "csi.oxide.computer"`,
			`.config.image: "the-image"`, `.config.readonly_rootfs: true`, `.config.cap_drop[]: "ALL"`,
			`.env.OXIDE_TOKEN_FILE: "/secrets/token"`, `.destination: "/secrets/token"`,
			`\nOXIDE_HOST={{ .host }}\nOXIDE_PROJECT={{ .project }}\nOXIDE_CLUSTER_ID={{ .cluster_id }}`},
			// No token in an environment variable: Nomad could not replace it in a running driver.
			[]string{"privileged", "OXIDE_TOKEN="}},
		{"node.nomad.hcl", "job", []string{`.type: "system"`, `.csi_plugin.type: "node"`,
			`.config.args[]: "--mode=node"`, `.config.args[]: "--endpoint=unix:///csi/csi.sock"`,
			`.csi_plugin.mount_dir: "/csi"`, `.csi_plugin.id: "csi.oxide.computer"`,
			`.config.image: "the-image"`, `.config.readonly_rootfs: true`, `.config.privileged: true`},
			[]string{"cap_drop"}},
		{"volume.hcl", "volume", []string{`.plugin_id: "csi.oxide.computer"`,
			`.capability[0].access_mode: "single-node-writer"`}, nil},
		// initdb refuses the mount's root directory, because that contains lost+found.
		{"postgres.nomad.hcl", "job", []string{`.env.PGDATA: "/var/lib/postgresql/data/pgdata"`,
			`.destination: "/var/lib/postgresql/data"`}, nil},
	} {
		out, complaints, err := run(t, nil, tool(t, "hcldec"), "--spec",
			filepath.Join("testdata", "nomad-"+c.spec+".hcldec"), "--vars",
			`{"var":{"image":"the-image"}}`, filepath.Join("nomad", c.file))
		var read map[string]any
		if err == nil {
			err = json.Unmarshal([]byte(out), &read)
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", c.file, err, complaints)
		}
		text := strings.Join(manifests{{Object: read}}.lines(), "\n") + "\n"
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s has no %s:\n%s", c.file, want, text)
			}
		}
		for _, not := range c.not {
			if strings.Contains(text, not) {
				t.Errorf("%s has %s:\n%s", c.file, not, text)
			}
		}
	}
}

func TestNomadFilesAreFormatted(t *testing.T) {
	files, err := filepath.Glob("*/*.hcl*")
	if err != nil || len(files) < 6 {
		t.Fatalf("found %q: %v", files, err)
	}
	for _, file := range files {
		if _, complaints, err := run(t, nil, tool(t, "hclfmt"), "-require-no-change", file); err != nil {
			t.Errorf("hclfmt would change %s: %v %s", file, err, complaints)
		}
	}
}

func TestUnknownFieldsInNomadJobsAreRejected(t *testing.T) {
	_, complaints, err := run(t, []byte("job \"a\" {\n  datacentres = [\"*\"]\n}\n"),
		tool(t, "hcldec"), "--spec", "testdata/nomad-job.hcldec")
	if err == nil || !strings.Contains(complaints, "datacentres") {
		t.Errorf("a misspelt field is accepted: %v %s", err, complaints)
	}
}
