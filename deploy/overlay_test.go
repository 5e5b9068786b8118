package deploy_test

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestTheSuiteInstallsWhatUsersInstall compares the end-to-end overlay with what users install.
// Only the paths of objects that are listed here may differ.
func TestTheSuiteInstallsWhatUsersInstall(t *testing.T) {
	users, suite := build(t, "kustomize/snapshots").byKey(t), build(t, "kustomize/e2e").byKey(t)
	added := map[string]bool{
		"Secret/oxide-csi/oxide-secret":         true, // every user creates this one
		"Deployment/oxide-csi/oxide-simulator":  true, // the rack
		"Service/oxide-csi/oxide-simulator":     true,
		"ServiceAccount/kube-system/" + snapper: true, // for a cluster that has none
		"ClusterRole//" + snapper:               true,
		"ClusterRoleBinding//" + snapper:        true,
		"Role/kube-system/" + snapper:           true,
		"RoleBinding/kube-system/" + snapper:    true,
		"Deployment/kube-system/" + snapper:     true,
	}
	for name := range suite {
		if users[name] == nil != added[name] {
			t.Errorf("%s: users have it %v, expected %v", name, users[name] != nil, !added[name])
		}
	}
	const (
		node       = "DaemonSet/oxide-csi/oxide-csi-node.spec.template.spec"
		controller = "Deployment/oxide-csi/oxide-csi-controller.spec.template.spec"
		plugin     = ".containers[oxide-plugin]"
	)
	allowed := []string{
		node + ".affinity",
		node + plugin + ".env[OXIDE_DEV_ROOT]",
		node + plugin + ".env[OXIDE_METRICS_ADDRESS]",
		node + plugin + ".env[OXIDE_SYSFS_ROOT]",
		node + plugin + ".ports",
		node + plugin + ".volumeMounts[guest]",
		node + ".volumes[guest]",
		controller + plugin + ".env[OXIDE_METRICS_ADDRESS]",
		controller + plugin + ".ports",
	}
	var got []string
	for name, object := range users {
		got = append(got, differences(name, object, suite[name])...)
	}
	slices.Sort(got)
	if !slices.Equal(got, allowed) {
		t.Errorf("the overlay changes\n%s\nwant\n%s", strings.Join(got, "\n"),
			strings.Join(allowed, "\n"))
	}
}

const snapper = "snapshot-controller"

// differences returns the paths at which a and b differ. It matches items of lists by their names.
func differences(path string, a, b any) []string {
	if x, y := named(a), named(b); x != nil && y != nil {
		var found []string
		for _, k := range slices.Sorted(maps.Keys(x)) {
			found = append(found, differences(path+k, x[k], y[k])...)
		}
		for _, k := range slices.Sorted(maps.Keys(y)) {
			if _, ok := x[k]; !ok {
				found = append(found, path+k)
			}
		}
		return found
	}
	if !reflect.DeepEqual(a, b) {
		return []string{path}
	}
	return nil
}

// named returns the parts of a mapping, or of a list whose items have names, by name.
func named(part any) map[string]any {
	parts := map[string]any{}
	switch part := part.(type) {
	case map[string]any:
		for k, v := range part {
			parts["."+k] = v
		}
	case []any:
		for _, item := range part {
			fields, _ := item.(map[string]any)
			name, ok := fields["name"].(string)
			if !ok {
				return nil
			}
			parts["["+name+"]"] = item
		}
	default:
		return nil
	}
	return parts
}
