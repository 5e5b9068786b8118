package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/template"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// manifests describes orphans as objects that a cluster can use again. Comments mark the fields
// that the rack does not know, which a person has to check.
var manifests = template.Must(template.New("").Funcs(template.FuncMap{"quote": quote}).Parse(
	`{{range .}}---
{{if eq .Kind "disk"}}apiVersion: v1
kind: PersistentVolume
metadata: {name: {{quote .ObjectName}}} # {{.Seen}}
spec:
  capacity: {storage: {{quote .Size}}}
  accessModes: [ReadWriteOnce] # as the claim's, or ReadWriteOncePod
  persistentVolumeReclaimPolicy: Retain # Delete, when all is well and its claim shall delete it
  storageClassName: oxide-disk # as the claim's
  claimRef: {namespace: {{quote .Namespace}}, name: {{quote .ClaimName}}} # {{.Because}}
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
metadata: {name: {{quote .ObjectName}}} # {{.Seen}}
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

// manifest is an orphan as an object of Kubernetes. Because is the reason for its claim.
type manifest struct {
	*listed
	Driver, ObjectName, Size, Seen, Namespace, ClaimName, Because string
}

var (
	// nameOfKubernetes matches names that an object of Kubernetes may have.
	nameOfKubernetes = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	// ofAChange matches what a change of a claim adds to its name, until the disk is handed over.
	ofAChange = regexp.MustCompile(`-(grow|revert)-[0-9a-f]{8}$`)
)

// writeManifests writes the orphans as manifests. An object has the CSI name, which is the name
// that its PersistentVolume had, and is reserved for the claim for which the disk was made. If that
// claim is unknown, or several disks were made for it, the object is reserved for a claim that does
// not exist, so that it is bound to none by mistake.
func (r *report) writeManifests(out io.Writer) error {
	var all []manifest
	of := map[string]int{}
	for _, o := range r.Orphans {
		if o.Foreign != "" || o.halfDeleted {
			continue
		}
		m := manifest{listed: o, Driver: volume.DriverName, ObjectName: o.CSIName,
			Size: fmt.Sprint(o.SizeBytes), Because: "that of its time"}
		m.Seen = strings.TrimSpace(fmt.Sprintf("made %s, %s %s", o.Created.UTC().Format(time.DateTime),
			csierr.Plain(o.State), o.AttachedTo))
		if !nameOfKubernetes.MatchString(o.CSIName) {
			m.ObjectName = "oxide-" + o.ID
		}
		m.Namespace, m.ClaimName, _ = strings.Cut(ofAChange.ReplaceAllString(o.Claim, ""), "/")
		all = append(all, m)
		of[string(o.Kind)+m.Namespace+"/"+m.ClaimName]++
	}
	for i, m := range all {
		switch {
		case !nameOfKubernetes.MatchString(m.Namespace) || !nameOfKubernetes.MatchString(m.ClaimName):
			m.Because = "unknown"
		case of[string(m.Kind)+m.Namespace+"/"+m.ClaimName] > 1:
			m.Because = "one of those made for " + m.Namespace + "/" + m.ClaimName + "; choose"
		default:
			continue
		}
		m.Namespace, m.ClaimName = "default", m.ObjectName
		all[i] = m
	}
	return manifests.Execute(out, all)
}
