// Package kube runs the user's kubectl for the operator's commands, and parses the output of
// kubectl get -o json. The driver itself never speaks to Kubernetes.
//
// An Object contains only the fields that these commands read: no Secret, no environment of a
// container, and no annotations of other programs. It contains mount options, which may be secret,
// because the doctor has to find them in other texts and remove them.
package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Kubectl runs kubectl with the user's configuration, and returns its standard output. An error
// contains the last line of its standard error.
func Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	return KubectlInput(ctx, nil, args...)
}

// Pinned returns a KubectlInput that keeps the context that is current now, even if the user
// changes it later. If there is no context, as in a pod, Pinned returns KubectlInput itself.
func Pinned(ctx context.Context) func(ctx context.Context, stdin []byte, args ...string) ([]byte,
	error) {
	name, err := Kubectl(ctx, "config", "current-context")
	if err != nil {
		return KubectlInput
	}
	pin := "--context=" + strings.TrimSpace(string(name))
	return func(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
		return KubectlInput(ctx, stdin, append(slices.Clone(args), pin)...)
	}
}

// KubectlInput is like Kubectl, with a standard input. On Linux, kubectl ends if this process ends.
func KubectlInput(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	// kubectl may run plugins, from which the rack's token must be hidden.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(entry string) bool {
		return strings.HasPrefix(entry, "OXIDE_")
	})
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := runMortal(cmd); err != nil {
		// kubectl's library may log lines before the error, which is the last line.
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		return nil, fmt.Errorf("kubectl %s: %w: %s", args[0], err, csierr.Plain(lines[len(lines)-1]))
	}
	return stdout.Bytes(), nil
}

// nameForm matches the names of objects. No name begins with a hyphen, as a flag does.
var nameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// IsName reports whether a text may be the name of an object.
func IsName(text string) bool { return len(text) <= 253 && nameForm.MatchString(text) }

// kinds contains the kinds whose fields Parse keeps. Of a Secret, for example, it keeps none.
var kinds = []string{"PersistentVolume", "PersistentVolumeClaim", "VolumeAttachment", "CSINode",
	"Node", "Pod", "Event", "VolumeSnapshot", "VolumeSnapshotContent", "DaemonSet", "ReplicaSet",
	"Deployment"}

// errIncomplete replaces the JSON decoder's error, because that error quotes values.
var errIncomplete = errors.New("is not the complete output of kubectl get -o json, or a field " +
	"has another type; repeat the command and keep all of its output")

// Parse parses one object, or a list, from the output of kubectl get -o json. If a list is
// truncated, or is one page of a longer list, Parse returns an error.
func Parse(data []byte) ([]Object, error) {
	var list struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Continue           string `json:"continue"`
			RemainingItemCount int64  `json:"remainingItemCount"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	// json.Unmarshal also refuses data after the object: two concatenated lists are no list.
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, errIncomplete
	}
	element, isList := strings.CutSuffix(list.Kind, "List")
	switch {
	case !isList:
		o, err := parseObject(data, list.Kind)
		return []Object{o}, err
	case list.Metadata.Continue != "" || list.Metadata.RemainingItemCount > 0:
		return nil, errors.New("is one page of a longer list")
	case list.Items == nil:
		return nil, errors.New("is a list without items")
	}
	objects := make([]Object, 0, len(list.Items))
	for _, item := range list.Items {
		o, err := parseObject(item, element)
		if err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// parseObject parses an object. kind is for an object without a kind, such as an item of a list.
func parseObject(data []byte, kind string) (Object, error) {
	var o struct {
		Kind string `json:"kind"`
	}
	err := json.Unmarshal(data, &o)
	if o.Kind != "" {
		kind = o.Kind
	}
	known := Object{Kind: kind}
	if err == nil && slices.Contains(kinds, kind) {
		err = json.Unmarshal(data, &known)
		known.Kind = kind
	}
	if err != nil {
		return Object{}, errIncomplete
	}
	return known, nil
}

// Object is an object of Kubernetes. If Parse keeps no fields of its kind, only Kind is set.
type Object struct {
	Kind     string   `json:"kind"`
	Metadata Metadata `json:"metadata"`
	Spec     Spec     `json:"spec,omitzero"`
	Status   Status   `json:"status,omitzero"`
	Event
}

// Metadata contains the fields of an object's metadata that the commands read.
type Metadata struct {
	Name              string      `json:"name"`
	Namespace         string      `json:"namespace,omitempty"`
	UID               string      `json:"uid,omitempty"`
	CreationTimestamp time.Time   `json:"creationTimestamp,omitzero"`
	DeletionTimestamp time.Time   `json:"deletionTimestamp,omitzero"`
	Finalizers        []string    `json:"finalizers,omitempty"`
	Annotations       Annotations `json:"annotations,omitzero"`
	OwnerReferences   []Owner     `json:"ownerReferences,omitempty"`
}

// Owner is an owner reference. At most one owner of an object is its controller.
type Owner struct {
	Kind       string `json:"kind"`
	UID        string `json:"uid"`
	Controller bool   `json:"controller,omitempty"`
}

// Controller returns the owner that is the controller. Without one, it returns an empty Owner.
func (m Metadata) Controller() (controller Owner) {
	for _, owner := range m.OwnerReferences {
		if owner.Controller {
			controller = owner
		}
	}
	return controller
}

// Annotations contains the provisioner of a claim, and the node keeper's plan for a node.
type Annotations struct {
	Provisioner string `json:"volume.kubernetes.io/storage-provisioner,omitempty"`
	KeeperPlan  string `json:"csi.oxide.computer/cold-attach-plan,omitempty"`
}

// Spec contains the fields of a spec that the commands read.
type Spec struct {
	// fields of a PersistentVolume
	CSI           CSISource         `json:"csi,omitzero"`
	ClaimRef      Reference         `json:"claimRef,omitzero"`
	Capacity      map[string]string `json:"capacity,omitempty"`
	MountOptions  []string          `json:"mountOptions,omitempty"`
	ReclaimPolicy string            `json:"persistentVolumeReclaimPolicy,omitempty"`

	// fields of a PersistentVolumeClaim
	VolumeName       string    `json:"volumeName,omitempty"`
	StorageClassName string    `json:"storageClassName,omitempty"`
	VolumeMode       string    `json:"volumeMode,omitempty"`
	DataSource       Reference `json:"dataSource,omitzero"`

	// fields of a VolumeAttachment, and of a VolumeSnapshotContent
	Attacher          string    `json:"attacher,omitempty"`
	Source            Source    `json:"source,omitzero"`
	Driver            string    `json:"driver,omitempty"`
	VolumeSnapshotRef Reference `json:"volumeSnapshotRef,omitzero"`

	// field of a CSINode
	Drivers []NodeDriver `json:"drivers,omitempty"`

	// fields of a Pod; nodeName also of a VolumeAttachment
	NodeName string      `json:"nodeName,omitempty"`
	Volumes  []PodVolume `json:"volumes,omitempty"`

	// field of a DaemonSet, a ReplicaSet or a Deployment
	Template struct {
		Spec struct {
			Containers []struct {
				Name string `json:"name"`
			} `json:"containers,omitempty"`
		} `json:"spec,omitzero"`
	} `json:"template,omitzero"`
}

// CSISource contains the CSI fields of a PersistentVolume.
type CSISource struct {
	Driver           string `json:"driver"`
	VolumeHandle     string `json:"volumeHandle"`
	VolumeAttributes struct {
		DiskName string `json:"diskName,omitempty"`
	} `json:"volumeAttributes,omitzero"`
}

// Reference names another object.
type Reference struct {
	Kind      string `json:"kind,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Source names the volume of a VolumeAttachment, or the source of a VolumeSnapshotContent.
type Source struct {
	PersistentVolumeName string `json:"persistentVolumeName,omitempty"`
	SnapshotHandle       string `json:"snapshotHandle,omitempty"`
	VolumeHandle         string `json:"volumeHandle,omitempty"`
}

// NodeDriver is a CSI driver that is registered with a node's kubelet.
type NodeDriver struct {
	Name        string `json:"name"`
	NodeID      string `json:"nodeID"`
	Allocatable struct {
		Count *int `json:"count,omitempty"`
	} `json:"allocatable,omitzero"`
}

// PodVolume is a volume of a pod, with its claim if it has one.
type PodVolume struct {
	Name                  string `json:"name"`
	PersistentVolumeClaim struct {
		ClaimName string `json:"claimName"`
	} `json:"persistentVolumeClaim,omitzero"`
	// Ephemeral is set if Kubernetes creates a claim for this volume together with the pod.
	Ephemeral *struct{} `json:"ephemeral,omitempty"`
}

// Status contains the fields of a status that the commands read.
type Status struct {
	Phase                 string            `json:"phase,omitempty"`
	Message               string            `json:"message,omitempty"`
	SnapshotHandle        string            `json:"snapshotHandle,omitempty"`
	Attached              bool              `json:"attached,omitempty"`
	AttachError           *Failure          `json:"attachError,omitempty"`
	DetachError           *Failure          `json:"detachError,omitempty"`
	Error                 *Failure          `json:"error,omitempty"`
	Conditions            []Condition       `json:"conditions,omitempty"`
	ContainerStatuses     []ContainerStatus `json:"containerStatuses,omitempty"`
	InitContainerStatuses []ContainerStatus `json:"initContainerStatuses,omitempty"`
}

// Failure is the last failure of an attach, a detach or a snapshot.
type Failure struct {
	Time    time.Time `json:"time,omitzero"`
	Message string    `json:"message"`
}

// Condition is one condition of an object.
type Condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	LastTransitionTime time.Time `json:"lastTransitionTime,omitzero"`
}

// ContainerStatus is a container's state. It omits messages: the container may write their text.
type ContainerStatus struct {
	Name         string `json:"name"`
	Ready        bool   `json:"ready"`
	RestartCount int    `json:"restartCount,omitempty"`
	State        struct {
		Waiting struct {
			Reason string `json:"reason,omitempty"`
		} `json:"waiting,omitzero"`
		Running    *struct{} `json:"running,omitempty"`
		Terminated *struct{} `json:"terminated,omitempty"`
	} `json:"state,omitzero"`
}

// Event contains the fields of an Event other than its metadata. An Event has no spec.
type Event struct {
	Reason         string    `json:"reason,omitempty"`
	Message        string    `json:"message,omitempty"`
	InvolvedObject Reference `json:"involvedObject,omitzero"`
	FirstTimestamp time.Time `json:"firstTimestamp,omitzero"`
	LastTimestamp  time.Time `json:"lastTimestamp,omitzero"`
	EventTime      time.Time `json:"eventTime,omitzero"`
	Series         struct {
		LastObservedTime time.Time `json:"lastObservedTime,omitzero"`
	} `json:"series,omitzero"`
}

// First returns when the event was first seen.
func (e Event) First() time.Time {
	if e.FirstTimestamp.IsZero() {
		return e.EventTime
	}
	return e.FirstTimestamp
}

// Last returns when the event was last seen.
func (e Event) Last() time.Time {
	return slices.MaxFunc([]time.Time{e.First(), e.LastTimestamp, e.Series.LastObservedTime},
		time.Time.Compare)
}
