package deploy_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// immutable contains the fields that Kubernetes refuses to change in an existing object. CSIDriver
// has two of them. podInfoOnMount and fsGroupPolicy were immutable before 1.29, which is the oldest
// version for the chart.
var immutable = map[string][]string{
	"CSIDriver":          {"spec.attachRequired", "spec.volumeLifecycleModes"},
	"StorageClass":       {"provisioner", "parameters", "reclaimPolicy", "volumeBindingMode"},
	"Deployment":         {"spec.selector.matchLabels"},
	"DaemonSet":          {"spec.selector.matchLabels"},
	"ClusterRoleBinding": {"roleRef.name"},
	"RoleBinding":        {"roleRef.name"},
}

// forever contains the values of these fields in every release. Nobody can upgrade to a release
// that changes one: Helm and kubectl apply end with "field is immutable", and the object would have
// to be deleted first, while pods use volumes.
var forever = map[string]string{
	"CSIDriver csi.oxide.computer spec.attachRequired":          `true`,
	"CSIDriver csi.oxide.computer spec.volumeLifecycleModes":    `["Persistent"]`,
	"ClusterRoleBinding oxide-csi-controller roleRef.name":      `"oxide-csi-controller"`,
	"ClusterRoleBinding " + snapshotsRole + " roleRef.name":     `"` + snapshotsRole + `"`,
	"RoleBinding oxide-csi-controller roleRef.name":             `"oxide-csi-controller"`,
	"DaemonSet oxide-csi-node spec.selector.matchLabels":        selector("oxide-csi-node"),
	"Deployment oxide-csi-controller spec.selector.matchLabels": selector("oxide-csi-controller"),
	"StorageClass oxide-disk parameters":                        `null`,
	"StorageClass oxide-disk provisioner":                       `"csi.oxide.computer"`,
	"StorageClass oxide-disk reclaimPolicy":                     `"Delete"`,
	"StorageClass oxide-disk volumeBindingMode":                 `"WaitForFirstConsumer"`,
}

const snapshotsRole = "oxide-csi-controller-snapshots"

func selector(app string) string {
	return fmt.Sprintf(`{"app":%q,"app.kubernetes.io/name":"oxide-csi-driver"}`, app)
}

func TestNoReleaseChangesAnImmutableField(t *testing.T) { // D-57
	for form, all := range map[string]manifests{
		"the chart":       objects(t, with("snapshots.enabled=true")...),
		"plain manifests": build(t, "kustomize/snapshots"),
		"the chart with values": objects(t, with("snapshots.enabled=true", "metrics.enabled=true",
			"topology=rack=a", "commonLabels.team=storage", "controller.podLabels.tier=csi")...),
	} {
		got := map[string]string{}
		for _, object := range all {
			addImmutable(t, got, object)
		}
		if diff := cmp.Diff(forever, got); diff != "" {
			t.Errorf("%s: immutable fields (-every release, +this one):\n%s", form, diff)
		}
	}
}

func addImmutable(t *testing.T, fields map[string]string, object *unstructured.Unstructured) {
	t.Helper()
	for _, path := range immutable[object.GetKind()] {
		value, _, err := unstructured.NestedFieldNoCopy(object.Object, strings.Split(path, ".")...)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		fields[object.GetKind()+" "+object.GetName()+" "+path] = string(text)
	}
}
