package deploy_test

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// nomadTask contains the parts of a job's only task.
type nomadTask struct {
	Driver string
	User   string
	Config struct {
		Image          string
		Args           []string
		Privileged     bool
		ReadonlyRootfs bool     `json:"readonly_rootfs"`
		CapDrop        []string `json:"cap_drop"`
		PidMode        string   `json:"pid_mode"`
	}
	CSIPlugin struct {
		ID       string
		Type     string
		MountDir string `json:"mount_dir"`
	} `json:"csi_plugin"`
	Env      map[string]string
	Template []struct {
		Destination string
		Data        string
		Env         bool
	}
}

type nomadJob struct {
	Type  string
	Group map[string]struct {
		Count int
		Task  map[string]nomadTask
	}
}

// decode reads an HCL file by a specification of its allowed contents.
func decode[T any](t *testing.T, spec, file string) T {
	t.Helper()
	out, complaints, err := run(t, nil, tool(t, "hcldec"), "--spec", filepath.Join("testdata", spec),
		"--vars", `{"var":{"image":"the-image"}}`, filepath.Join("nomad", file))
	if err != nil {
		t.Fatalf("%s: %v\n%s", file, err, complaints)
	}
	var decoded T
	if err := json.Unmarshal([]byte(out), &decoded); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return decoded
}

func job(t *testing.T, file string) (nomadJob, nomadTask) {
	t.Helper()
	jobs := decode[struct{ Job map[string]nomadJob }](t, "nomad-job.hcldec", file).Job
	for _, j := range jobs {
		for _, group := range j.Group {
			for _, task := range group.Task {
				return j, task
			}
		}
	}
	t.Fatalf("%s has no task", file)
	return nomadJob{}, nomadTask{}
}

func TestNomadRunsTheSamePlugin(t *testing.T) { // D-3
	ids := map[string]bool{}
	for mode, sort := range map[string]string{"controller": "service", "node": "system"} {
		j, task := job(t, mode+".nomad.hcl")
		p := task.CSIPlugin
		ids[p.ID] = true
		if j.Type != sort || p.Type != mode || !slices.Contains(task.Config.Args, "--mode="+mode) ||
			!slices.Contains(task.Config.Args, "--endpoint=unix://"+p.MountDir+"/csi.sock") ||
			task.Config.Image != "the-image" || !task.Config.ReadonlyRootfs {
			t.Errorf("the job of the %s is a %s with %v", mode, j.Type, task)
		}
		if task.Config.Privileged != (mode == "node") ||
			slices.Equal(task.Config.CapDrop, []string{"ALL"}) != (mode == "controller") {
			t.Errorf("the %s has the powers %v", mode, task.Config)
		}
	}
	volume := decode[struct {
		PluginID   string `json:"plugin_id"`
		Capability []struct {
			AccessMode string `json:"access_mode"`
		}
	}](t, "nomad-volume.hcldec", "volume.hcl")
	if !ids[volume.PluginID] || len(ids) != 1 ||
		volume.Capability[0].AccessMode != "single-node-writer" {
		t.Errorf("the volume is of %s in mode %v, the plugins are %v", volume.PluginID,
			volume.Capability, ids)
	}
}

func TestNomadsControllerGetsTheRackFromVariables(t *testing.T) {
	_, task := job(t, "controller.nomad.hcl")
	var variables string
	for _, template := range task.Template {
		if template.Env {
			variables += template.Data
		} else if template.Destination != task.Env["OXIDE_TOKEN_FILE"] {
			t.Errorf("the token is in %s, and looked for in %v", template.Destination, task.Env)
		}
	}
	for _, name := range []string{"OXIDE_HOST=", "OXIDE_PROJECT=", "OXIDE_CLUSTER_ID="} {
		if !strings.Contains(variables, name) {
			t.Errorf("the controller is not given %s", name)
		}
	}
	if strings.Contains(variables, "OXIDE_TOKEN") {
		t.Error("the token is in the environment, and a new one would need a restart")
	}
}

func TestNomadsPostgresUsesTheVolume(t *testing.T) {
	_, task := job(t, "postgres.nomad.hcl")
	if data := task.Env["PGDATA"]; !strings.HasPrefix(data, "/var/lib/postgresql/data/") {
		t.Errorf("PGDATA is %s, where lost+found is in initdb's way", data)
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
