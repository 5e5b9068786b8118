package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// wantedSource provides the list of wanted volumes.
type wantedSource interface {
	read(ctx context.Context) (wanted, error)
}

func (o Options) wantedSource() wantedSource {
	if o.Kubectl {
		return kubectl{}
	}
	return &wantedFile{path: o.Volumes, complete: o.Delete, began: time.Now()}
}

// wantedFile is a file of handles, one per line, or of Kubernetes' JSON; "-" is standard input.
type wantedFile struct {
	path string
	// complete requires that the last line marks the end of the list.
	complete bool
	began    time.Time // the audit
	once     *wanted   // the list from standard input, which can be read only once
}

// maxWantedBytes is more than the list of any cluster and less than a machine's memory.
const maxWantedBytes = 1 << 30

func (f *wantedFile) read(context.Context) (wanted, error) {
	if f.once != nil {
		return *f.once, nil
	}
	file := os.Stdin
	if f.path != "-" {
		var err error
		if file, err = os.Open(f.path); err != nil {
			return wanted{}, fmt.Errorf("--volumes: %w", err)
		}
		defer func() { _ = file.Close() }()
	}
	// A file is as old as its last write: Kubernetes' JSON has no time of its own. What comes through
	// a pipe may have been listed as soon as the audit began.
	at := f.began
	if info, err := file.Stat(); err != nil {
		return wanted{}, fmt.Errorf("--volumes: %w", err)
	} else if info.Mode().IsRegular() && info.ModTime().Before(at) {
		at = info.ModTime()
	}
	data, err := io.ReadAll(io.LimitReader(file, maxWantedBytes+1))
	if err == nil && len(data) > maxWantedBytes {
		err = errors.New("has more than 1 GiB")
	}
	if err != nil {
		return wanted{}, fmt.Errorf("--volumes: %w", err)
	}
	t, err := parseWanted(data, at)
	if err == nil && f.complete && !isComplete(data) {
		err = errors.New(`its last line is not "# end", so it may be truncated; with --delete, write ` +
			`that line after all handles`)
	}
	if err != nil {
		return wanted{}, fmt.Errorf("--volumes: %w", err)
	}
	if f.path == "-" {
		f.once = &t
	}
	return t, nil
}

// parseWanted parses handles, one per line, or Kubernetes' JSON.
func parseWanted(data []byte, at time.Time) (wanted, error) {
	t := newWanted(at)
	if isJSON(data) {
		return t, t.addKubernetes(data)
	}
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if _, ok := volume.ParseID(line); !ok {
			return t, fmt.Errorf("line %d is not a volume handle of this driver (a UUID), and the file is "+
				"not JSON: %.40q", i+1, line)
		}
		t.add(either, line, fmt.Sprintf("line %d", i+1))
	}
	return t, nil
}

func isJSON(data []byte) bool { return bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) }

// isComplete reports whether a list cannot be truncated: it is JSON, which has been parsed, or
// lines with an end.
func isComplete(data []byte) bool {
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	word, isComment := strings.CutPrefix(strings.TrimSpace(lines[len(lines)-1]), "#")
	return isJSON(data) || isComment && strings.TrimSpace(word) == "end"
}

func (t *wanted) addKubernetes(data []byte) error {
	objects, err := kube.Parse(data)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if err := t.addKubeObject(o); err != nil {
			return err
		}
	}
	return nil
}

func (t *wanted) addKubeObject(o kube.Object) error {
	by := o.Kind + " " + o.Metadata.Name
	switch o.Kind {
	case "PersistentVolume":
		if o.Spec.CSI.Driver != volume.DriverName {
			return nil
		}
		if o.Spec.CSI.VolumeHandle == "" {
			return fmt.Errorf("the %s has no volumeHandle", by)
		}
		t.add(kindDisk, o.Spec.CSI.VolumeHandle, by)
		t.addClaim(o.Spec.ClaimRef.UID)
	case "VolumeSnapshotContent":
		if o.Spec.Driver != volume.DriverName {
			return nil
		}
		for _, id := range []string{o.Status.SnapshotHandle, o.Spec.Source.SnapshotHandle} {
			if id != "" {
				t.add(kindSnapshot, id, by)
			}
		}
		t.addClaim(o.Spec.VolumeSnapshotRef.UID)
	case "PersistentVolumeClaim", "VolumeSnapshot":
		t.addClaim(o.Metadata.UID)
	default:
		return fmt.Errorf("contains a %.40q, which is neither a volume, a claim nor a snapshot", o.Kind)
	}
	return nil
}

// kubectl reads the wanted volumes from kubectl's current cluster. Incomplete output is an error.
type kubectl struct{}

// snapshotCRDs are the custom resources of snapshots, which not every cluster has.
const snapshotCRDs = "volumesnapshotcontents.snapshot.storage.k8s.io " +
	"volumesnapshots.snapshot.storage.k8s.io"

func (kubectl) read(ctx context.Context) (wanted, error) {
	at := time.Now()
	crds := strings.Fields(snapshotCRDs)
	there, err := kube.Kubectl(ctx, slices.Concat([]string{"get", "customresourcedefinitions"}, crds,
		[]string{"--ignore-not-found", "--output=name"})...)
	if err != nil {
		return wanted{}, err
	}
	kinds := []string{"persistentvolumes", "persistentvolumeclaims"}
	for _, crd := range crds {
		if slices.ContainsFunc(strings.Fields(string(there)), func(name string) bool {
			return strings.HasSuffix(name, "/"+crd)
		}) {
			kinds = append(kinds, crd)
		}
	}
	list, err := kube.Kubectl(ctx, "get", strings.Join(kinds, ","), "--all-namespaces",
		"--output=json")
	if err != nil {
		return wanted{}, err
	}
	t := newWanted(at)
	if err := t.addKubernetes(list); err != nil {
		return wanted{}, fmt.Errorf("the output of kubectl %w", err)
	}
	return t, nil
}
