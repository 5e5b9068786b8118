package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/template"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// manifests are the objects with which a cluster has its orphans again. What the rack does not know
// is left to the person who applies them.
var manifests = template.Must(template.New("").Funcs(template.FuncMap{"quote": quote}).Parse(
	`{{range .}}---
{{if eq .Kind "disk"}}apiVersion: v1
kind: PersistentVolume
metadata: {name: {{quote .ObjectName}}}
spec:
  capacity: {storage: {{quote .Size}}}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain # Delete, when all is well and its claim shall delete it
  storageClassName: oxide-disk # as the claim's
  {{- if .ClaimName}}
  claimRef: {namespace: {{quote .Namespace}}, name: {{quote .ClaimName}}} # when the disk was made
  {{- end}}
  {{- if eq .Use "block"}}
  volumeMode: Block
  {{- end}}
  csi:
    driver: {{.Driver}}
    volumeHandle: {{.ID}}
    {{- if ne .Use "block"}}
    fsType: ext4 # what the disk holds; if another, the pod's events name it
    {{- end}}
{{else}}apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: {{quote .ObjectName}}}
spec:
  deletionPolicy: Retain
  driver: {{.Driver}}
  source: {snapshotHandle: {{.ID}}}
  volumeSnapshotRef: {namespace: {{quote .Namespace}}, name: {{quote .ClaimName}}}
{{end}}{{end}}`))

// quote quotes a string as JSON and YAML do.
func quote(s string) (string, error) {
	text, err := json.Marshal(s)
	return string(text), err
}

// manifest is an orphan as an object of Kubernetes.
type manifest struct {
	*listed
	Driver, ObjectName, Size, Namespace, ClaimName string
}

// nameOfKubernetes matches names that an object of Kubernetes may have.
var nameOfKubernetes = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// writeManifests writes the orphans as manifests. An object has the CSI name, which is the name
// that its PersistentVolume had, and belongs to the claim for which it was made, if the rack shows
// both in full.
func (r *report) writeManifests(out io.Writer) error {
	var all []manifest
	for _, o := range r.Orphans {
		if o.Foreign != "" || o.halfDeleted {
			continue
		}
		m := manifest{listed: o, Driver: volume.DriverName, ObjectName: o.CSIName,
			Size: fmt.Sprint(o.SizeBytes)}
		if !nameOfKubernetes.MatchString(o.CSIName) {
			m.ObjectName = "oxide-" + o.ID
		}
		namespace, name, whole := strings.Cut(o.Claim, "/")
		if whole && nameOfKubernetes.MatchString(namespace) && nameOfKubernetes.MatchString(name) {
			m.Namespace, m.ClaimName = namespace, name
		} else if o.Kind == kindSnapshot {
			m.Namespace, m.ClaimName = "default", m.ObjectName
		}
		all = append(all, m)
	}
	return manifests.Execute(out, all)
}
