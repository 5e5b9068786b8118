package deploy_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

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
