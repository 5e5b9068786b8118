package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// object is any object of Kubernetes, with all its fields: the command creates the claim again, and
// must keep fields that it does not know.
type object map[string]any

func (o object) at(path ...string) any {
	var value any = map[string]any(o)
	for _, key := range path {
		fields, _ := value.(map[string]any)
		value = fields[key]
	}
	return value
}

func (o object) str(path ...string) string  { text, _ := o.at(path...).(string); return text }
func (o object) num(path ...string) int64   { n, _ := o.at(path...).(float64); return int64(n) }
func (o object) name() string               { return o.str("metadata", "name") }
func (o object) uid() string                { return o.str("metadata", "uid") }
func (o object) annotation(k string) string { return o.str("metadata", "annotations", k) }
func (o object) deleting() bool             { return o.str("metadata", "deletionTimestamp") != "" }

func (o object) policy() string { return o.str("spec", "persistentVolumeReclaimPolicy") }

func (o object) list(path ...string) []object {
	items, _ := o.at(path...).([]any)
	var found []object
	for _, item := range items {
		if fields, ok := item.(map[string]any); ok {
			found = append(found, fields)
		}
	}
	return found
}

func (o object) copyFields(into map[string]any, part string, keys ...string) {
	for _, key := range keys {
		if value := o.at(part, key); value != nil {
			into[key] = value
		}
	}
}

func (o object) controller() object {
	for _, owner := range o.list("metadata", "ownerReferences") {
		if owner.at("controller") == true {
			return owner
		}
	}
	return nil
}

// kinds contains the kinds that the command changes, and those of the owners of pods. path is the
// API path for deletions. If scales is "yes", the command scales objects of the kind.
var kinds = map[string]struct{ resource, scales, path string }{
	"PersistentVolume":      {persistentVolumes, "", ""},
	"PersistentVolumeClaim": {claims, "", "/api/v1/namespaces/%s/persistentvolumeclaims/"},
	"VolumeSnapshot": {snapshots, "",
		"/apis/snapshot.storage.k8s.io/v1/namespaces/%s/volumesnapshots/"},
	"Deployment":  {"deployments.apps", "yes", ""},
	"StatefulSet": {"statefulsets.apps", "yes", ""},
	"ReplicaSet":  {"replicasets.apps", "no", ""},
}

const (
	persistentVolumes = "persistentvolumes"
	claims            = "persistentvolumeclaims"
	snapshots         = "volumesnapshots.snapshot.storage.k8s.io"
	snapshotContents  = "volumesnapshotcontents.snapshot.storage.k8s.io"
	snapshotClasses   = "volumesnapshotclasses.snapshot.storage.k8s.io"
	storageClasses    = "storageclasses.storage.k8s.io"
	volumeAttachments = "volumeattachments.storage.k8s.io"
)

// Kubectl runs the user's kubectl. Its methods read and change the cluster's objects.
type Kubectl func(ctx context.Context, stdin []byte, args ...string) ([]byte, error)

// get returns an object, or nil if it does not exist, or if the resource or the name is "".
func (k Kubectl) get(ctx context.Context, resource, namespace, name string) (object, error) {
	if resource == "" || name == "" {
		return nil, nil
	}
	// The API server may not have checked the name, and kubectl takes a leading hyphen for a flag.
	if !kube.IsName(name) {
		return nil, fmt.Errorf("%q is no name of an object", csierr.Plain(name))
	}
	args := []string{"get", resource, name, "--ignore-not-found", "--output=json"}
	out, err := k(ctx, nil, inNamespace(args, namespace)...)
	if err != nil || len(strings.TrimSpace(string(out))) == 0 {
		return nil, err
	}
	var o object
	if err := json.Unmarshal(out, &o); err != nil {
		return nil, fmt.Errorf("the output of kubectl get %s %s is not JSON: %w", resource, name, err)
	}
	return o, nil
}

func (k Kubectl) all(ctx context.Context, resource, namespace string, flags ...string) ([]object,
	error) {
	args := append([]string{"get", resource, "--output=json"}, flags...)
	out, err := k(ctx, nil, inNamespace(args, namespace)...)
	if err != nil {
		return nil, err
	}
	var list object
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("the output of kubectl get %s is not JSON: %w", resource, err)
	}
	if list.str("metadata", "continue") != "" || list.at("items") == nil {
		return nil, fmt.Errorf("the output of kubectl get %s is not a complete list", resource)
	}
	return list.list("items"), nil
}

func inNamespace(args []string, namespace string) []string {
	if namespace == "" {
		return args
	}
	return append(args, "--namespace="+namespace)
}

// patch merges a change into an object. If the object has changed since it was read, or was created
// again, the API server refuses the patch.
func (k Kubectl) patch(ctx context.Context, o object, change object, flags ...string) error {
	meta, _ := change["metadata"].(object)
	guarded := object{"uid": o.uid(), "resourceVersion": o.str("metadata", "resourceVersion")}
	maps.Copy(guarded, meta)
	change["metadata"] = guarded
	// A plan may exceed the 128 KiB that Linux allows for an argument, so pass it on standard input.
	args := append([]string{"patch", kinds[o.str("kind")].resource, o.name(), "--type=merge",
		"--patch-file=/dev/stdin"}, flags...)
	return k.send(ctx, change, inNamespace(args, o.str("metadata", "namespace"))...)
}

func (k Kubectl) send(ctx context.Context, o object, args ...string) error {
	text, err := json.Marshal(o)
	if err == nil {
		_, err = k(ctx, text, args...)
	}
	return err
}

// createOwned creates a claim without the owners that no longer exist, because Kubernetes deletes a
// claim if all of its owners are gone. It logs the omitted owners.
func (k Kubectl) createOwned(ctx context.Context, log func(string, ...any), o object,
	flags ...string) error {
	meta, _ := o["metadata"].(object)
	var owners []object
	for _, ref := range meta.list("ownerReferences") {
		kind, group := strings.ToLower(ref.str("kind")), ref.str("apiVersion")
		if !kube.IsName(kind) {
			return fmt.Errorf("%q is no kind of an owner", csierr.Plain(kind))
		}
		if group, version, found := strings.Cut(group, "/"); found {
			kind += "." + version + "." + group
		}
		owner, err := k.get(ctx, kind, meta.str("namespace"), ref.str("name"))
		switch {
		case err != nil && !strings.Contains(err.Error(), "doesn't have a resource type"):
			return err
		case owner != nil && owner.uid() == ref.str("uid"):
			owners = append(owners, ref)
		default:
			log("    note: the owner %s %s is gone, and the claim is made without it",
				csierr.Plain(ref.str("kind")), csierr.Plain(ref.str("name")))
		}
	}
	if delete(meta, "ownerReferences"); len(owners) > 0 {
		meta["ownerReferences"] = owners
	}
	return k.create(ctx, o, flags...)
}

func (k Kubectl) create(ctx context.Context, o object, flags ...string) error {
	return k.send(ctx, o, append([]string{"create", "--filename=-", "--output=name"}, flags...)...)
}

const dryRun = "--dry-run=server"

// remove deletes an object unless it has changed since it was read. kubectl delete does not check
// this, and may delete a later object with the same name.
func (k Kubectl) remove(ctx context.Context, o object, flags ...string) error {
	if o.deleting() {
		return nil
	}
	options := object{"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": object{
		"uid": o.uid(), "resourceVersion": o.str("metadata", "resourceVersion")}}
	if slices.Contains(flags, dryRun) { // kubectl takes the flag only without --raw
		options["dryRun"] = []string{"All"}
	}
	path := fmt.Sprintf(kinds[o.str("kind")].path, o.str("metadata", "namespace")) + o.name()
	return k.send(ctx, options, "delete", "--raw="+path, "--filename=-")
}

// annotate returns a patch that sets an annotation, or removes it if value is nil. The patch also
// sets the given fields of the spec.
func annotate(key string, value any, spec object) object {
	patch := object{"metadata": object{"annotations": map[string]any{key: value}}}
	if spec != nil {
		patch["spec"] = spec
	}
	return patch
}

func withPolicy(policy string) object { return object{"persistentVolumeReclaimPolicy": policy} }

// holders returns the pods that name a claim. Kubernetes keeps a deleted claim until they are gone.
// Unlike users(), holders also returns pods that have ended.
func holders(pods []object, claim string) []object {
	return slices.DeleteFunc(slices.Clone(pods), func(pod object) bool {
		return !slices.ContainsFunc(pod.list("spec", "volumes"), func(v object) bool {
			return v.str("persistentVolumeClaim", "claimName") == claim
		})
	})
}

func users(pods []object, claim string) []object {
	return slices.DeleteFunc(holders(pods, claim), func(pod object) bool {
		phase := pod.str("status", "phase")
		return phase == "Succeeded" || phase == "Failed"
	})
}

func names(objects []object) string {
	var all []string
	for _, o := range objects {
		all = append(all, o.name())
	}
	return strings.Join(all, ", ")
}

func parseSize(text string) (int64, error) {
	n, err := parseQuantity(text)
	if err != nil || n == 0 {
		return 0, errors.New("has to be a whole number with a unit, such as 200Gi")
	}
	return n, nil
}

func parseQuantity(text string) (int64, error) {
	digits := strings.TrimRight(text, "KMGTPEikmgtpe")
	unit, known := map[string]int64{"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
		"E": 1e18, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
		"Ei": 1 << 60}[text[len(digits):]]
	n, err := strconv.ParseInt(digits, 10, 64)
	if !known || err != nil || n < 0 || n > (1<<62)/unit {
		return 0, fmt.Errorf("%q is not a whole number with a unit", csierr.Plain(text))
	}
	return n * unit, nil
}
