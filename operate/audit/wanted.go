package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// handle is the id of a wanted volume or snapshot.
type handle struct {
	Kind   Kind
	ID     string
	By     string // "PersistentVolume pv-1", "line 3"
	volume string // the name of the PersistentVolume
}

// mayBe reports whether the handle may name an object of the kind.
func (h handle) mayBe(kind Kind) bool { return h.Kind == kind || h.Kind == either }

type wanted struct {
	handles  []handle
	listedAt time.Time // when the list was made, at the latest
	readAt   rack.Look // when it had been read

	// named contains each UUID in the list, and each name of the form that the driver gives to disks
	// and snapshots, with the object of the list that contains it.
	named map[string]string
	texts [][2]string // for each object of the list: its kind and name, and its JSON
}

// add adds an object of the list. A disk or snapshot may be named in any field or annotation:
// during a change of a claim or a move of a volume only an annotation names it.
func (w *wanted) add(by, text string) {
	text = strings.ToLower(text)
	for _, name := range namesIn(text) {
		if w.named[name] == "" {
			w.named[name] = by
		}
	}
	w.texts = append(w.texts, [2]string{by, text})
}

// namesIn returns the UUIDs and the names of the driver's form in a text.
func namesIn(text string) (names []string) {
	const uuidBytes, dash = 36, 8
	for i := range text {
		if end := i + volume.SerialBytes; end <= len(text) && volume.IsOwnName(text[i:end]) {
			names = append(names, text[i:end])
		}
		if end := i + uuidBytes; end <= len(text) && text[i+dash] == '-' && volume.IsID(text[i:end]) {
			names = append(names, text[i:end])
		}
	}
	return names
}

// names returns the object of the list that names a disk or snapshot: by its id, its name, the CSI
// name for which it was made, or a UUID in that. That UUID is the UID of the claim or of the
// VolumeSnapshot, which may not contain the id yet.
func (w *wanted) names(o object) (by string, ok bool) {
	csiName := strings.ToLower(o.CSIName)
	for _, name := range namesIn(o.ID + " " + o.Name + " " + csiName) {
		if by, ok := w.named[name]; ok {
			return by, true
		}
	}
	for _, t := range w.texts {
		if strings.Contains(t[1], csiName) {
			return t[0], true
		}
	}
	return "", false
}

func (w *wanted) addHandle(kind Kind, id, by, pv string) {
	if canonical, ok := volume.ParseID(id); ok {
		id = canonical
	}
	w.handles = append(w.handles, handle{kind, id, by, pv})
}

// read reads the list of wanted volumes. Only kubectl's exit status shows that a list is complete:
// a file or a pipe may end too early.
func (o *Options) read(ctx context.Context) (*wanted, error) {
	at := time.Now()
	if o.Kubectl {
		data, err := kubectlList(ctx)
		if err != nil {
			return nil, err
		}
		return parseWanted("the output of kubectl", data, at)
	}
	file := os.Stdin
	if o.Volumes != "-" {
		var err error
		if file, err = os.Open(o.Volumes); err != nil {
			return nil, fmt.Errorf("--volumes: %w", err)
		}
		defer func() { _ = file.Close() }()
	}
	// Kubernetes' JSON contains no time. A file was listed at its last write at the latest, and the
	// content of a pipe may have been listed when the audit began.
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() && info.ModTime().Before(at) {
		at = info.ModTime()
	}
	data, readErr := io.ReadAll(file)
	if err := errors.Join(err, readErr); err != nil {
		return nil, fmt.Errorf("--volumes: %w", err)
	}
	return parseWanted("--volumes:", data, at)
}

// parseWanted parses handles, one per line, or Kubernetes' JSON.
func parseWanted(from string, data []byte, at time.Time) (*wanted, error) {
	w := &wanted{listedAt: at, readAt: rack.Looking(), named: map[string]string{}}
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		if err := w.addKubernetes(data); err != nil {
			return nil, fmt.Errorf("%s %w", from, err)
		}
		return w, nil
	}
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		by := fmt.Sprintf("line %d", i+1)
		if _, ok := volume.ParseID(line); !ok {
			return nil, fmt.Errorf("%s %s is not a volume handle of this driver (a UUID), and the list is "+
				"not JSON: %.40q", from, by, line)
		}
		w.add(by, line)
		w.addHandle(either, line, by, "")
	}
	return w, nil
}

func (w *wanted) addKubernetes(data []byte) error {
	objects, err := kube.Parse(data)
	if err != nil {
		return err
	}
	var list struct{ Items []json.RawMessage }
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	if list.Items == nil { // a single object, and not a list
		list.Items = []json.RawMessage{data}
	}
	for i, o := range objects {
		by := strings.TrimSpace(o.Kind + " " + path.Join(o.Metadata.Namespace, o.Metadata.Name))
		w.add(by, string(list.Items[i]))
		switch handle := o.Spec.CSI.VolumeHandle; {
		case o.Kind == "Status":
			return errors.New("is an error of Kubernetes and no list")
		case o.Kind == "PersistentVolume" && o.Spec.CSI.Driver == volume.DriverName && handle == "":
			return fmt.Errorf("has the %s without a volumeHandle", by)
		case o.Kind == "PersistentVolume" && o.Spec.CSI.Driver == volume.DriverName:
			w.addHandle(kindDisk, handle, by, o.Metadata.Name)
		case o.Kind == "VolumeSnapshotContent" && o.Spec.Driver == volume.DriverName:
			if id := cmp.Or(o.Status.SnapshotHandle, o.Spec.Source.SnapshotHandle); id != "" {
				w.addHandle(kindSnapshot, id, by, "")
			}
		}
	}
	return nil
}

// kubectlList returns all objects of the kinds that name disks or snapshots in kubectl's current
// cluster. The node keeper's move names volumes in annotations of the CSIDriver.
func kubectlList(ctx context.Context) ([]byte, error) {
	kinds := "persistentvolumes,persistentvolumeclaims,volumeattachments,csidrivers,nodes"
	crds, err := kube.Kubectl(ctx, "get", "customresourcedefinitions", "--output=name")
	if err != nil {
		return nil, err
	}
	for _, name := range strings.Fields(string(crds)) {
		// Not every cluster has snapshots. The groups of snapshots have the same suffix.
		if _, crd, _ := strings.Cut(name, "/"); strings.HasSuffix(crd, "snapshot.storage.k8s.io") {
			kinds += "," + crd
		}
	}
	return kube.Kubectl(ctx, "get", kinds, "--all-namespaces", "--output=json")
}
