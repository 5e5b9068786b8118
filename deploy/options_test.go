package deploy_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// notesOf returns the notes that the chart prints in a namespace.
func notesOf(t *testing.T, namespace string, args ...string) string {
	t.Helper()
	// Helm prints notes only for an installation, so a template beside them prints them here.
	dir := filepath.Join(t.TempDir(), "chart")
	if err := os.CopyFS(dir, os.DirFS("chart")); err != nil {
		t.Fatal(err)
	}
	templates := filepath.Join(dir, "templates")
	err := os.Rename(filepath.Join(templates, "NOTES.txt"), filepath.Join(dir, "notes"))
	if err != nil {
		t.Fatal(err)
	}
	show := []byte("notes: |\n{{ tpl (.Files.Get \"notes\") . | indent 2 }}\n")
	if err := os.WriteFile(filepath.Join(templates, "notes.yaml"), show, 0o644); err != nil {
		t.Fatal(err)
	}
	out, complaints, err := run(t, nil, tool(t, "helm"), append([]string{"template", "oxide-csi",
		dir, "--namespace", namespace, "--kube-version", kubernetes, "--show-only",
		"templates/notes.yaml"}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, complaints)
	}
	return out
}

func TestTheChartsNotesListWhatTheUserStillHasToDo(t *testing.T) {
	const secret, cluster = "kubectl create secret generic", "no cluster was asked"
	got := notesOf(t, "there")
	for _, want := range []string{secret + " oxide-secret --namespace there", "--from-literal=host=",
		"--from-literal=cluster-id=my-cluster\n", cluster, "If that is not there yet",
		"it is unknown whether the Secret oxide-secret has one, and which one this release had before",
		"Snapshots are off: the cluster does not have the snapshot CRDs"} {
		if !strings.Contains(got, want) {
			t.Errorf("the notes lack %q:\n%s", want, got)
		}
	}
	got = notesOf(t, "there", with("clusterId=a", "snapshots.enabled=true", "secret.create=true",
		"secret.host=https://a", "secret.token=hush", "secret.project=p")...)
	for _, not := range []string{secret, cluster, "Snapshots are off", "hush"} {
		if strings.Contains(got, not) {
			t.Errorf("the notes have %q:\n%s", not, got)
		}
	}
}

func TestTheChartsNotesSayWhatIsSeenWithoutHotPlug(t *testing.T) {
	const byHand, label = "howto/attach-by-hand.md", "csi.oxide.computer/cold-attach=allowed"
	const dry, keeper = "(dryRun)", "nodeKeeper.enabled=true"
	for _, c := range []struct {
		values []string
		notes  map[string]bool // whether the notes have the text
	}{
		{nil, map[string]bool{byHand: true, label: false}},
		{[]string{keeper}, map[string]bool{byHand: false, label: true, dry: false}},
		{[]string{keeper, "nodeKeeper.coldAttach.dryRun=true"},
			map[string]bool{byHand: false, label: true, dry: true}},
		{[]string{keeper, "nodeKeeper.coldAttach.enabled=false"},
			map[string]bool{byHand: true, label: false}},
	} {
		got := notesOf(t, "there", with(c.values...)...)
		c.notes["FailedAttachVolume that says InstanceMustBeStopped"] = true
		for text, want := range c.notes {
			if strings.Contains(got, text) != want {
				t.Errorf("%v: the notes have %q: %v, want %v:\n%s", c.values, text, !want, want, got)
			}
		}
	}
}

func TestTheChartsNotesDependOnTheExistingSecret(t *testing.T) {
	const create, lacks = "kubectl create secret", "WARNING: the Secret oxide-secret has no key token"
	for _, c := range []struct {
		name         string
		objects      map[string]any
		want, absent []string
	}{
		{"a Secret that is not there", nil, []string{"The Secret is not there yet", create,
			"--from-literal=cluster-id=" + systemUID + "\n"}, []string{lacks, "WARNING"}},
		{"a whole one", map[string]any{secretPath: secretWith("cluster-id")}, []string{
			"The cluster's id is that of the Secret's key cluster-id"}, []string{create, "WARNING"}},
		{"one without a token", map[string]any{secretPath: map[string]any{"apiVersion": "v1",
			"kind": "Secret", "metadata": map[string]any{"name": "oxide-secret"},
			"data": map[string]any{"host": "eA==", "project": "eA=="}}}, []string{lacks},
			[]string{create, "no key host", "no key project"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := notesOf(t, "oxide-csi", answering(t, c.objects)...)
			for _, want := range c.want {
				if !strings.Contains(got, want) {
					t.Errorf("the notes lack %q:\n%s", want, got)
				}
			}
			for _, not := range c.absent {
				if strings.Contains(got, not) {
					t.Errorf("the notes have %q:\n%s", not, got)
				}
			}
		})
	}
}

// The driver reads host, project and certificates only at its start. It reads a new token without a
// restart.
func TestAChangedHostOfTheChartsOwnSecretReplacesThePods(t *testing.T) {
	mark := func(set ...string) string {
		t.Helper()
		all := objects(t, with(append([]string{"secret.create=true", "secret.token=a",
			"secret.project=p", "secret.host=https://a"}, set...)...)...)
		marks := pods(t, all)[controllerName].Annotations
		if len(marks) != 1 {
			t.Errorf("the controller's pods have the annotations %v", marks)
		}
		for _, value := range marks {
			return value
		}
		return ""
	}
	first := mark()
	for set, changes := range map[string]bool{"secret.host=https://b": true, "secret.project=q": true,
		"secret.token=b": false, "ownCA=true,secret.caBundle=c": true} {
		if got := mark(set); (got != first) != changes {
			t.Errorf("with %s the pods are replaced: %v, want %v", set, got != first, changes)
		}
	}
	if marks := pods(t, objects(t))[controllerName].Annotations; len(marks) > 0 {
		t.Errorf("with a Secret made elsewhere the pods have the annotations %v", marks)
	}
}
