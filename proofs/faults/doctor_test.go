package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// doctor counts the results of the doctor for calls that have failed.
type doctor struct {
	mu sync.Mutex
	// mu guards the fields below. situations contains the calls and reasons for which the doctor was
	// asked.
	situations    map[string]bool
	right, unseen int
}

// ask runs the doctor for a call that has failed, while the rack works again. The doctor gets the
// objects that Kubernetes would show, and must find the call's reason. ask runs it once for each
// call and reason.
func (d *doctor) ask(ctx context.Context, env *environment, request proto.Message,
	callError error) error {
	reason, _, ours := strings.Cut(status.Convert(callError).Message(), ": ")
	objects, question := kubernetesOf(request, callError)
	if question == nil || !ours || strings.Contains(reason, " ") || !env.mayBe(request) {
		return nil // Kubernetes does not make this call for a claim, or the error has no reason
	}
	situation := fmt.Sprintf("%T %s", request, reason)
	d.mu.Lock()
	asked := d.situations[situation]
	d.situations[situation] = true
	d.mu.Unlock()
	if asked {
		return nil
	}
	said, err := env.doctor(ctx, objects, question)
	if err != nil {
		return fmt.Errorf("%s: %w", situation, err)
	}
	found := said.Chains[0].Finding
	if want := linkOf(request, reason); found.Reason != reason || found.Link != want {
		return fmt.Errorf("%s: the doctor finds %s at %s; want %s at %s: %s", situation,
			found.Reason, found.Link, reason, want, found.Wrong)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.right++
	d.unseen += len(said.Unseen())
	return nil
}

// mayBe reports whether the call is for an existing volume, on a running node. Otherwise the doctor
// reports that fault first.
func (env *environment) mayBe(request proto.Message) bool {
	if r, ok := request.(interface{ GetVolumeId() string }); ok && r.GetVolumeId() == nobody {
		return false
	}
	r, ok := request.(interface{ GetNodeId() string })
	return !ok || r.GetNodeId() == env.up
}

// linkOf returns the link of the chain at which the doctor must find the failure.
func linkOf(request proto.Message, reason string) string {
	for prefix, link := range map[string]string{"Rack": "rack", "Token": "rack", "Role": "rack",
		"Project": "rack", "EffectUnknown": "rack", "NameTaken": "rack", "ObjectNotFound": "rack",
		"Conflict": "disk", "Disk": "disk", "OtherProject": "disk", "VolumeNotFound": "disk",
		"Instance": "instance", "Serial": "serial", "BootDisk": "disk"} {
		if strings.HasPrefix(reason, prefix) {
			return link
		}
	}
	switch request.(type) {
	case *csi.CreateVolumeRequest:
		return "claim"
	case *csi.DeleteVolumeRequest:
		return "volume"
	}
	return "attachment"
}

// doctor runs oxide-csi-plugin doctor.
func (env *environment) doctor(ctx context.Context, objects []byte, question []string) (
	said harness.Diagnosis, err error) {
	file := filepath.Join(env.Rack.Dir, "objects.json")
	if err := os.WriteFile(file, objects, 0o600); err != nil {
		return said, err
	}
	path, err := env.run.Binary(ctx, "oxide-csi-plugin")
	if err != nil {
		return said, err
	}
	cmd := exec.CommandContext(ctx, path, append([]string{"doctor"}, append(question,
		"--output=json", "--objects="+file)...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0",
		"OXIDE_HOST=" + env.Rack.URL, "OXIDE_TOKEN_FILE=" + env.tokenFile,
		"OXIDE_PROJECT=" + env.Rack.Project}
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	_ = cmd.Run() // the exit status is not zero if the doctor finds a fault
	if err := json.Unmarshal(out.Bytes(), &said); err != nil || len(said.Chains) != 1 {
		return said, fmt.Errorf("the doctor printed %s%s: %w", out.String(), log.String(), err)
	}
	return said, nil
}

// kubernetesOf returns the objects that Kubernetes shows after a failed call, and the doctor's
// arguments. It returns nil for a call that Kubernetes does not make for a claim.
func kubernetesOf(request proto.Message, callError error) (objects []byte, question []string) {
	type object = map[string]any
	const claim, volume, node = "data", "pv-1", "node-1"
	now := time.Now().UTC()
	failed := object{"time": now, "message": callError.Error()}
	claimMeta := object{"name": claim, "namespace": "default", "creationTimestamp": now}
	event := func(kind, namespace, name, reason string) object {
		return object{"kind": "Event", "metadata": object{"name": "e", "namespace": "default"},
			"involvedObject": object{"kind": kind, "name": name, "namespace": namespace},
			"type":           "Warning", "reason": reason, "message": callError.Error(),
			"lastTimestamp": now}
	}
	pv := func(handle, phase string) object {
		return object{"kind": "PersistentVolume", "metadata": object{"name": volume},
			"spec": object{"claimRef": claimMeta, "csi": object{"driver": "csi.oxide.computer",
				"volumeHandle": handle}, "persistentVolumeReclaimPolicy": "Delete"},
			"status": object{"phase": phase}}
	}
	bound := object{"kind": "PersistentVolumeClaim", "metadata": claimMeta,
		"spec": object{"volumeName": volume}, "status": object{"phase": "Bound"}}
	csiNode := func(id string) object {
		return object{"kind": "CSINode", "metadata": object{"name": node}, "spec": object{
			"drivers": []object{{"name": "csi.oxide.computer", "nodeID": id}}}}
	}
	attachment := func(meta, status object) object {
		return object{"kind": "VolumeAttachment", "metadata": meta, "spec": object{
			"attacher": "csi.oxide.computer", "nodeName": node,
			"source": object{"persistentVolumeName": volume}}, "status": status}
	}
	var items []object
	switch r := request.(type) {
	case *csi.CreateVolumeRequest:
		items = []object{{"kind": "PersistentVolumeClaim", "metadata": claimMeta,
			"spec": object{}, "status": object{"phase": "Pending"}},
			event("PersistentVolumeClaim", "default", claim, "ProvisioningFailed")}
		question = []string{"pvc", "default/" + claim}
	case *csi.ControllerPublishVolumeRequest:
		items = []object{bound, pv(r.GetVolumeId(), "Bound"), csiNode(r.GetNodeId()),
			attachment(object{"name": "a"}, object{"attached": false, "attachError": failed})}
		question = []string{"volume", r.GetVolumeId()}
	case *csi.ControllerUnpublishVolumeRequest:
		items = []object{bound, pv(r.GetVolumeId(), "Bound"), csiNode(r.GetNodeId()),
			attachment(object{"name": "a", "deletionTimestamp": now},
				object{"attached": true, "detachError": failed})}
		question = []string{"volume", r.GetVolumeId()}
	case *csi.DeleteVolumeRequest:
		items = []object{pv(r.GetVolumeId(), "Released"),
			event("PersistentVolume", "", volume, "VolumeFailedDelete")}
		question = []string{"volume", r.GetVolumeId()}
	default:
		return nil, nil
	}
	objects, err := json.Marshal(object{"kind": "List", "items": items})
	if err != nil {
		panic(err) // impossible: maps of strings and times
	}
	return objects, question
}
