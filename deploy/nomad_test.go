package deploy_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// TestNomadRunsTheSamePlugin parses the files by a specification that names every allowed field.
func TestNomadRunsTheSamePlugin(t *testing.T) { // D-3
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
			// A token in a variable could only be replaced by a restart.
			[]string{"privileged", "OXIDE_TOKEN="}},
		{"node.nomad.hcl", "job", []string{`.type: "system"`, `.csi_plugin.type: "node"`,
			`.config.args[]: "--mode=node"`, `.config.args[]: "--endpoint=unix:///csi/csi.sock"`,
			`.csi_plugin.mount_dir: "/csi"`, `.csi_plugin.id: "csi.oxide.computer"`,
			`.config.image: "the-image"`, `.config.readonly_rootfs: true`, `.config.privileged: true`},
			[]string{"cap_drop"}},
		{"volume.hcl", "volume", []string{`.plugin_id: "csi.oxide.computer"`,
			`.capability[0].access_mode: "single-node-writer"`}, nil},
		// initdb refuses the root of the mount, because it contains lost+found.
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

func TestNomadsFilesAreFormatted(t *testing.T) {
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
