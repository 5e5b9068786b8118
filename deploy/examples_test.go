package deploy_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

func TestTheRFDsExampleIsKeptAsItIs(t *testing.T) { // D-58, D-59
	text := string(readFile(t, "examples/rfd-595-postgres.yaml"))
	// The RFD's text, whose indentation the page does not show.
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
	all := parse(t, text)
	claim := find[corev1.PersistentVolumeClaim](t, all, "PersistentVolumeClaim", "oxide-postgres-data")
	class := find[storagev1.StorageClass](t, build(t, "kustomize/base"), "StorageClass", "oxide-disk")
	if *claim.Spec.StorageClassName != class.Name {
		t.Errorf("the claim names the class %s, the manifests bring %s", *claim.Spec.StorageClassName,
			class.Name)
	}
	pod := find[corev1.Pod](t, all, "Pod", "postgres")
	if pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != claim.Name {
		t.Errorf("the pod has %v", pod.Spec.Volumes)
	}
}

func TestPostgresHasADirectoryOfItsOwn(t *testing.T) { // D-59
	all := parse(t, string(readFile(t, "examples/postgres.yaml")))
	pod := find[appsv1.StatefulSet](t, all, "StatefulSet", "postgres").Spec.Template.Spec
	c := container(t, pod, "postgres")
	mount := c.VolumeMounts[0].MountPath
	if data := variable(t, c, "PGDATA").Value; !strings.HasPrefix(data, mount+"/") {
		t.Errorf("PGDATA is %s: at the mount %s itself, lost+found is in initdb's way", data, mount)
	}
	password := variable(t, c, "POSTGRES_PASSWORD").ValueFrom.SecretKeyRef
	if find[corev1.Secret](t, all, "Secret", password.Name).StringData[password.Key] == "" {
		t.Errorf("the password is not in %v", password)
	}
}

func TestAStaticVolumeIsRetained(t *testing.T) { // D-2
	all := parse(t, string(readFile(t, "examples/static.yaml")))
	pv := find[corev1.PersistentVolume](t, all, "PersistentVolume", "oxide-static")
	claim := find[corev1.PersistentVolumeClaim](t, all, "PersistentVolumeClaim", "oxide-static")
	if pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
		t.Errorf("the policy is %s: the driver would refuse the deletion",
			pv.Spec.PersistentVolumeReclaimPolicy)
	}
	if pv.Spec.StorageClassName != "" || *claim.Spec.StorageClassName != "" ||
		claim.Spec.VolumeName != pv.Name || pv.Spec.ClaimRef.Name != claim.Name ||
		pv.Spec.CSI.Driver != "csi.oxide.computer" || len(pv.Spec.CSI.VolumeAttributes) > 0 {
		t.Errorf("volume %v and claim %v do not find each other", pv.Spec, claim.Spec)
	}
}

func TestARestoreIsOfASnapshotOfTheExample(t *testing.T) { // D-18, D-71
	all := parse(t, string(readFile(t, "examples/snapshot-restore.yaml")))
	rfd := parse(t, string(readFile(t, "examples/rfd-595-postgres.yaml")))
	origin := find[corev1.PersistentVolumeClaim](t, rfd, "PersistentVolumeClaim",
		"oxide-postgres-data")
	restored := find[corev1.PersistentVolumeClaim](t, all, "PersistentVolumeClaim",
		"oxide-postgres-copy")
	snapshot := all.kinds("VolumeSnapshot")[0]
	spec := snapshot.Object["spec"].(map[string]any)
	from := spec["source"].(map[string]any)["persistentVolumeClaimName"]
	class := build(t, "kustomize/snapshots").kinds("VolumeSnapshotClass")[0].GetName()
	if from != origin.Name || spec["volumeSnapshotClassName"] != class ||
		restored.Spec.DataSource.Name != snapshot.GetName() {
		t.Errorf("the snapshot is %v, the volume from it %v", spec, restored.Spec.DataSource)
	}
	if restored.Spec.Resources.Requests.Storage().Cmp(*origin.Spec.Resources.Requests.Storage()) < 0 {
		t.Error("the volume is smaller than the snapshot")
	}
}

func TestABlockVolumeIsADevice(t *testing.T) { // D-15
	all := parse(t, string(readFile(t, "examples/block.yaml")))
	claim := find[corev1.PersistentVolumeClaim](t, all, "PersistentVolumeClaim", "oxide-block")
	pod := find[corev1.Pod](t, all, "Pod", "block")
	if *claim.Spec.VolumeMode != corev1.PersistentVolumeBlock ||
		len(pod.Spec.Containers[0].VolumeDevices) != 1 ||
		pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != claim.Name {
		t.Errorf("claim %v, pod %v", claim.Spec, pod.Spec)
	}
}
