//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
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
	"mounts.txt": "cat /proc/mounts; losetup --list --output-all",
	"guest.txt":  "ls -lR /oxide 2>/dev/null | head -200; ls -lR /run/csi.oxide.computer 2>/dev/null",
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
	keep := func(name string, content any, err error) {
		text, isText := content.(string)
		if !isText {
			document, marshalErr := yaml.Marshal(content)
			text, err = string(document), errors.Join(err, marshalErr)
		}
		if err != nil {
			text += "\n(not complete: " + err.Error() + ")\n"
		}
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(text), 0o644)); err != nil {
			GinkgoWriter.Println("keep evidence:", err)
		}
	}
	if api != nil {
		for _, kind := range evidenceKinds {
			list, err := api.list(ctx, kind)
			for _, object := range list {
				object.SetManagedFields(nil)
			}
			keep(strings.ToLower(kind.Kind)+"s.yaml", list, err)
		}
	}
	if theRack != nil {
		state, err := theRack.Admin.State(ctx)
		keep("rack/state.yaml", state, err)
		requests, err := theRack.Admin.Requests(ctx, 0)
		keep("rack/requests.yaml", requests, err)
	}
	for name, n := range machines {
		for file, script := range nodeEvidence {
			out, err := n.run(ctx, script)
			keep(filepath.Join(name, file), out, err)
		}
	}
	// The logs of the nodes, and of every container and the one before it.
	if err := provider.CollectLogs(clusterName, dir); err != nil {
		GinkgoWriter.Println("keep the nodes' logs:", err)
	}
	fmt.Fprintln(os.Stderr, "evidence of the failure lies in", dir)
}
