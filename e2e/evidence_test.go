//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

// evidenceKinds lists the kinds of objects that are saved after a failure.
var evidenceKinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Pod"},
	{Version: "v1", Kind: "Event"},
	{Version: "v1", Kind: "Node"},
	{Version: "v1", Kind: "PersistentVolume"},
	{Version: "v1", Kind: "PersistentVolumeClaim"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "VolumeAttachment"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "CSINode"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshot"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"},
}

// nodeEvidence contains scripts that run on every node, by the name of the file for their output.
var nodeEvidence = map[string]string{
	"mounts.txt":  "cat /proc/mounts; losetup --list --output-all",
	"guest.txt":   "ls -lR /oxide 2>/dev/null | head -200; ls -lR /run/csi.oxide.computer 2>/dev/null",
	"kubelet.log": "journalctl --unit kubelet --no-pager --lines 2000",
}

var notInFileNames = regexp.MustCompile(`[^A-Za-z0-9-]+`)

// collectEvidence writes everything known about a failure into one directory, and prints its path.
// It also records what could not be read.
func collectEvidence(suffix string) {
	if config.evidence == "" {
		return
	}
	name := notInFileNames.ReplaceAllString(CurrentSpecReport().FullText()+" "+suffix, "-")
	dir := filepath.Join(config.evidence, strings.Trim(name[:min(len(name), 120)], "-"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	e := evidence{ctx: ctx, dir: dir}
	if api != nil {
		e.objects()
		e.logs()
	}
	if theRack != nil {
		e.rack()
	}
	for name, n := range machines {
		for file, script := range nodeEvidence {
			out, err := n.run(ctx, script)
			e.keep(filepath.Join(name, file), []byte(out), err)
		}
	}
	fmt.Fprintln(os.Stderr, "evidence of the failure lies in", dir)
}

type evidence struct {
	ctx context.Context
	dir string
}

// keep writes one file: the content, or the error if there is one.
func (e evidence) keep(name string, content []byte, err error) {
	if err != nil {
		content = append(content, []byte("\n(not complete: "+err.Error()+")\n")...)
	}
	path := filepath.Join(e.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		GinkgoWriter.Println("keep evidence:", err)
		return
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		GinkgoWriter.Println("keep evidence:", err)
	}
}

func (e evidence) objects() {
	for _, kind := range evidenceKinds {
		list, err := api.list(e.ctx, kind)
		var text []byte
		for _, object := range list {
			object.SetManagedFields(nil)
			document, marshalErr := yaml.Marshal(object.Object)
			if marshalErr != nil {
				err = marshalErr
			}
			text = append(append(text, "---\n"...), document...)
		}
		e.keep(strings.ToLower(kind.Kind)+"s.yaml", text, err)
	}
}

// logs saves the logs of all our containers, including those of the container before.
func (e evidence) logs() {
	for _, namespace := range []string{driverNamespace, "kube-system"} {
		list, err := api.CoreV1().Pods(namespace).List(e.ctx, metav1.ListOptions{})
		if err != nil {
			e.keep("logs/"+namespace, nil, err)
			continue
		}
		for _, p := range list.Items {
			for _, c := range p.Status.ContainerStatuses {
				e.log(p, c.Name, false)
				if c.RestartCount > 0 {
					e.log(p, c.Name, true)
				}
			}
		}
	}
}

func (e evidence) log(p corev1.Pod, container string, previous bool) {
	file := filepath.Join("logs", p.Name+"."+container+".log")
	if previous {
		file = filepath.Join("logs", p.Name+"."+container+".before.log")
	}
	text, err := api.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
		Container: container, Previous: previous}).DoRaw(e.ctx)
	e.keep(file, text, err)
}

func (e evidence) rack() {
	state, err := theRack.Admin.State(e.ctx)
	text, _ := yaml.Marshal(state)
	e.keep("rack/state.yaml", text, err)
	requests, err := theRack.Admin.Requests(e.ctx, 0)
	text, _ = yaml.Marshal(requests)
	e.keep("rack/requests.yaml", text, err)
}
