package controller

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	postDisk  = "POST /v1/disks"
	viewSnap  = "GET /v1/snapshots/" + racktest.Snapshot
	viewImage = "GET /v1/images/" + racktest.Image
)

// viewName is the request that looks up the disk of pvc-1 by its name.
var viewName = "GET /v1/disks/" + volume.DiskName("blue", "pvc-1")

func created(want, body string) racktest.Exchange {
	return racktest.Exchange{Want: want, Status: 201, Body: body}
}

func accepted(want, body string) racktest.Exchange {
	return racktest.Exchange{Want: want, Status: 202, Body: body}
}

var (
	taken = racktest.Error(400, "ObjectAlreadyExists", `already exists: disk "x"`)
	full  = racktest.Error(507, "InsufficientCapacity", "Insufficient capacity: Storage Limit "+
		"Exceeded")
)

func TestABlankVolumeIsOneRequest(t *testing.T) { // B-14, D-13, D-20, D-21, D-25
	c := rackThat(t, racktest.Exchange{Want: postDisk, Status: 201, Body: racktest.DiskOf("creating"),
		Query: "project=" + racktest.ProjectID, Check: func(t *testing.T, body []byte) {
			var got map[string]any
			must(t, json.Unmarshal(body, &got))
			want := `{"description":"csi.oxide.computer ` +
				`{\"name\":\"pvc-1\",\"cluster\":\"blue\",\"origin\":\"blank\",` +
				`\"use\":\"filesystem\"}",` +
				`"disk_backend":{"disk_source":{"block_size":4096,"type":"blank"},` +
				`"type":"distributed"},` +
				`"name":"` + volume.DiskName("blue", "pvc-1") + `","size":10737418240}`
			if racktest.JSON(got) != want {
				t.Errorf("D-20, D-21: got %s\nwant %s", racktest.JSON(got), want)
			}
		}})
	r := createRequest()
	r.Secrets = map[string]string{"password": "ignored"}
	answer, err := c.CreateVolume(t.Context(), r)
	must(t, err)
	csitest.SameMessage(t, answer, &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: racktest.Disk, CapacityBytes: 10 * volume.GiB,
		VolumeContext: map[string]string{"diskName": volume.DiskName("blue", "pvc-1"),
			"diskId":    racktest.Disk,
			"blockSize": "4096"},
	}})
}

func TestD61AVolumeWithThePlacementInstanceIsAnOrdinaryDisk(t *testing.T) {
	var bodies []string
	post := created(postDisk, racktest.DiskOf("creating"))
	post.Check = func(_ *testing.T, body []byte) { bodies = append(bodies, string(body)) }
	again := taken.To(postDisk)
	again.Check = post.Check
	c := rackThat(t, post, again, racktest.OK(viewName, racktest.DiskOf("detached")), again,
		racktest.OK(viewName, racktest.DiskOf("detached")))
	c.Topology, c.TopologyInstance = rackA, true
	elsewhere := csitest.Topologies("rack=a,instance=" + racktest.OtherInstance)
	for _, test := range []struct {
		placement string
		at, want  []*csi.Topology
	}{
		{"instance", instanceAt("rack=a,"), instanceAt("rack=a,")},
		{"instance", elsewhere, elsewhere}, // the scheduler chose anew
		{"rack", elsewhere, csitest.Topologies("rack=a")},
	} {
		r := createRequest()
		r.Parameters = map[string]string{"placement": test.placement}
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: test.at, Preferred: test.at}
		answer, err := c.CreateVolume(t.Context(), r)
		must(t, err)
		got := answer.GetVolume()
		csitest.SameMessage(t, &csi.Volume{AccessibleTopology: got.GetAccessibleTopology()},
			&csi.Volume{AccessibleTopology: test.want})
		if _, ok := got.GetVolumeContext()["placement"]; ok {
			t.Errorf("the context is %v", got.GetVolumeContext())
		}
	}
	if len(bodies) != 3 || bodies[0] != bodies[1] || bodies[1] != bodies[2] ||
		strings.Contains(bodies[0], racktest.Instance) {
		t.Errorf("the rack was asked for %q", bodies)
	}
}

func TestCV18ARepeatedCreateFindsTheDisk(t *testing.T) {
	for name, refusal := range map[string]racktest.Exchange{"OX-1 name taken": taken,
		"quota full": full} {
		t.Run(name, func(t *testing.T) {
			for _, state := range []string{"detached", racktest.AttachedHere, "maintenance"} {
				c := rackThat(t, refusal.To(postDisk), racktest.OK(viewName, racktest.DiskOf(state)))
				answer, err := c.CreateVolume(t.Context(), createRequest())
				if err != nil || answer.GetVolume().GetVolumeId() != racktest.Disk ||
					answer.GetVolume().GetVolumeContext()["diskName"] != volume.DiskName("blue", "pvc-1") {
					t.Errorf("%s: got %v, %v", state, answer, err)
				}
			}
		})
	}
}

// The claim's name may change hands under the same volume name, so it is no reason to refuse.
func TestCV18TheClaimIsALabelOfTheDisk(t *testing.T) {
	c := rackThat(t, racktest.Exchange{Want: postDisk, Status: 201, Body: racktest.DiskOf("creating"),
		Check: func(t *testing.T, body []byte) {
			var got struct{ Description string }
			must(t, json.Unmarshal(body, &got))
			if want := `csi.oxide.computer {"name":"pvc-1","cluster":"blue","origin":"blank",` +
				`"use":"filesystem","claim":"shop/data"}`; got.Description != want {
				t.Errorf("got %s\nwant %s", got.Description, want)
			}
		}}, taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("detached",
		racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "blue", Claim: "shop/data",
			Origin: volume.OriginBlank, Use: volume.UseFilesystem}.Description()))))
	for _, claim := range []string{"data", "renamed"} {
		r := createRequest()
		r.Parameters = map[string]string{"csi.storage.k8s.io/pvc/namespace": "shop",
			"csi.storage.k8s.io/pvc/name": claim}
		answer, err := c.CreateVolume(t.Context(), r)
		if err != nil || answer.GetVolume().GetVolumeId() != racktest.Disk {
			t.Errorf("for the claim %s: got %v, %v", claim, answer, err)
		}
	}
}

func TestCV19AnotherVolumeWithTheNameIsReported(t *testing.T) { // CV-19
	for name, edit := range map[string]func(map[string]any){
		"another size": racktest.With("size", 20*volume.GiB),
		"other blocks": racktest.With("block_size", 512),
		"another type": racktest.With("disk_type", "local"),
		"a snapshot's": racktest.With("snapshot_id", racktest.Snapshot),
		"an image's":   racktest.With("image_id", racktest.Image),
		"read-only":    racktest.With("read_only", true),
		"made by hand": racktest.With("description", "mine"),
		"of another cluster": racktest.With("description", volume.Tag{Name: "pvc-1",
			Cluster: "red"}.Description()),
		"a collision": racktest.With("description", volume.Tag{Name: "pvc-2",
			Cluster: "blue"}.Description()),
		"for raw access": racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
			Use: volume.UseBlock}.Description()),
		"with mkfsOptions": racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
			MkfsOptions: "reservedPercent=0"}.Description()),
	} {
		t.Run(name, func(t *testing.T) {
			r := createRequest()
			r.CapacityRange = csitest.Range(10*volume.GiB, 10*volume.GiB)
			c := rackThat(t, taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("detached", edit)))
			_, err := c.CreateVolume(t.Context(), r)
			csitest.Want(t, err, codes.AlreadyExists, csierr.VolumeExists)
		})
	}
}

func TestCV20ADiskBeingCreatedIsAwaited(t *testing.T) {
	view := "GET /v1/disks/" + racktest.Disk
	c := rackThat(t, taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("creating")),
		racktest.OK(view, racktest.DiskOf("creating")), racktest.OK(view, racktest.DiskOf("detached")))
	if _, err := c.CreateVolume(t.Context(), createRequest()); err != nil {
		t.Error(err)
	}

	c = rackThat(t, taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("creating")))
	ctx, cancel := context.WithTimeout(t.Context(), answerMargin)
	defer cancel()
	_, err := c.CreateVolume(ctx, createRequest())
	csitest.Want(t, err, codes.Aborted, csierr.DiskBusy)
}

func TestFailedCreations(t *testing.T) {
	faulted := slices.Clip(script{created(postDisk, racktest.DiskOf("faulted"))})
	deleted := racktest.Exchange{Want: racktest.DeleteDisk, Status: 204}
	for _, s := range []scriptedCall{
		{"CV-21 a disk of the name is faulted", script{taken.To(postDisk), racktest.OK(viewName,
			racktest.DiskOf("faulted"))}, codes.Aborted, csierr.DiskFaulted, ""},
		{"CV-21 the disk is made faulted, and is deleted", append(faulted, noInstances, shown("faulted"),
			deleted),
			codes.Internal, csierr.DiskFaulted, "deleted again"},
		{"CV-21 a disk that is made faulted and does not stay so", script{faulted[0], noInstances, free},
			codes.Aborted, csierr.DiskBusy, ""},
		{"CV-21 a disk that is made faulted and that an instance has", append(faulted, oneInstance,
			racktest.OK(beside, racktest.PageOf("", racktest.DiskOf("faulted")))), codes.Unavailable,
			csierr.EffectUnknown, racktest.Instance},
		{"CV-21 a disk that is made faulted and cannot be deleted", append(faulted, noInstances,
			shown("faulted"), racktest.Error(403, "Forbidden", "Forbidden").To(racktest.DeleteDisk)),
			codes.Unavailable, csierr.EffectUnknown, "Forbidden"},
		{"CV-22 no capacity", script{full.To(postDisk), noName},
			codes.ResourceExhausted, csierr.RackFull, ""},
		{"a project that is missing for the create alone", script{racktest.NotFound.To(postDisk),
			ownProject, ownUser, noName}, codes.NotFound, csierr.ProjectNotFound, ""},
		{"a missing project", script{racktest.NotFound.To(postDisk), noProject}, codes.Unavailable,
			csierr.EffectUnknown, "ProjectNotFound"},
		{"a token that is refused when the disk is there", script{racktest.Error(401, "Unauthorized",
			"no").To(postDisk), ownProject, ownUser, racktest.Error(503, "ServiceNotAvailable",
			"later").To(viewName)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CV-20 a disk that was being created is gone", script{taken.To(postDisk),
			racktest.OK(viewName, racktest.DiskOf("creating")), noDisk}, codes.Aborted, csierr.DiskBusy,
			""},
		{"CV-20 a disk that had the name is gone", script{taken.To(postDisk),
			noName}, codes.Aborted, csierr.DiskBusy, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).CreateVolume(t.Context(), createRequest())
			s.verify(t, err)
		})
	}
}

func TestALostResponseIsUnavailableAndTheRetryConverges(t *testing.T) {
	c := rackThat(t, racktest.Exchange{Want: postDisk, Cut: true}, noName, taken.To(postDisk),
		racktest.OK(viewName, racktest.DiskOf("detached")))
	_, err := c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
	if _, err := c.CreateVolume(t.Context(), createRequest()); err != nil {
		t.Error(err)
	}
}

func TestAnInvalidResponseIsRejected(t *testing.T) {
	for name, edit := range map[string]func(map[string]any){
		"no id":          racktest.With("id", "7"),
		"another name":   racktest.With("name", "csi-0000000000000000"),
		"no name":        racktest.With("name", ""),
		"another size":   racktest.With("size", 9*volume.GiB),
		"no size":        racktest.With("size", 0),
		"other blocks":   racktest.With("block_size", 512),
		"odd blocks":     racktest.With("block_size", 520),
		"another type":   racktest.With("disk_type", "local"),
		"attached":       racktest.With("state", racktest.StateOf("attached "+racktest.Instance)),
		"no state":       racktest.With("state", nil),
		"read-only":      racktest.With("read_only", true),
		"another source": racktest.With("snapshot_id", racktest.Snapshot),
		"another tag":    racktest.With("description", "x"),
		"far too large":  racktest.With("size", uint64(1)<<63),
		"of another name": racktest.With("description", volume.Tag{Name: "pvc-9",
			Cluster: "blue"}.Description()),
	} {
		t.Run(name, func(t *testing.T) {
			answer := created(postDisk, racktest.DiskOf("creating", edit))
			_, err := rackThat(t, answer, noName).CreateVolume(t.Context(), createRequest())
			csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
			// A disk that was created all the same is found.
			if _, err := rackThat(t, answer, racktest.OK(viewName,
				racktest.DiskOf("detached"))).CreateVolume(
				t.Context(), createRequest()); err != nil {
				t.Error(err)
			}
		})
	}
}

// gaveUp are responses that leave open whether the change was made.
var gaveUp = map[string]racktest.Exchange{
	"HTTP 500":           racktest.Error(500, "Internal", "Internal Server Error"),
	"HTTP 408":           {Status: 408, Body: "<html>timeout</html>"},
	"HTTP 520":           {Status: 520, Body: "<html>the origin is odd</html>"},
	"HTTP 302":           {Status: 302, Body: ""},
	"HTTP 503":           racktest.Error(503, "ServiceNotAvailable", "Service Unavailable"),
	"a proxy's HTTP 403": proxied("", 403),
	"no answer":          {Cut: true},
}

func TestOX8AnUnclearCreateIsResolvedByTheName(t *testing.T) {
	for name, answer := range gaveUp {
		for _, test := range []struct {
			name   string
			found  script
			code   codes.Code
			reason csierr.Reason
		}{
			{"the disk is there", script{racktest.OK(viewName, racktest.DiskOf("detached"))}, codes.OK,
				""},
			{"it is being made", script{racktest.OK(viewName, racktest.DiskOf("creating")), free},
				codes.OK, ""},
			{"another has the name", script{racktest.OK(viewName, racktest.DiskOf("detached",
				racktest.With("description", "mine")))}, codes.Unavailable, csierr.EffectUnknown},
			{"a disk that is faulted", script{racktest.OK(viewName, racktest.DiskOf("faulted"))},
				codes.Aborted, csierr.DiskFaulted},
			{"it cannot be read", script{racktest.Error(403, "Forbidden", "Forbidden").To(viewName)},
				codes.Unavailable, csierr.EffectUnknown},
		} {
			t.Run(name+", "+test.name, func(t *testing.T) {
				_, err := rackThat(t, append(script{answer.To(postDisk)}, test.found...)...).
					CreateVolume(t.Context(), createRequest())
				scriptedCall{code: test.code, reason: test.reason}.verify(t, err)
			})
		}
		t.Run(name+", no disk has the name", func(t *testing.T) {
			_, err := rackThat(t, answer.To(postDisk), noName).CreateVolume(t.Context(),
				createRequest())
			if got := status.Code(err); got != codes.Unavailable {
				t.Errorf("got %v, want Unavailable: the rack may still make it", err)
			}
		})
	}
}

func TestParametersReachTheDisk(t *testing.T) {
	for _, test := range []struct {
		name       string
		parameters map[string]string
		before     script
		answer     string
		want       string // in the request's body
		context    map[string]string
	}{
		{"D-23 blocks of 512 bytes", map[string]string{"blockSize": "512"}, nil,
			racktest.DiskOf("creating", racktest.With("block_size", 512)),
			`{"disk_source":{"block_size":512,"type":"blank"},"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": racktest.Disk,
				"blockSize": "512"}},
		{"a local disk", map[string]string{"diskType": "local"}, nil, racktest.DiskOf("creating",
			racktest.With("disk_type", "local")), `{"type":"local"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": racktest.Disk,
				"blockSize": "4096"}},
		{"an image", map[string]string{"imageId": racktest.Image}, script{racktest.OK(viewImage,
			racktest.JSON(map[string]any{"id": racktest.Image, "size": volume.GiB + 1, "block_size": 512,
				"project_id": nil}))}, racktest.DiskOf("creating", racktest.With("image_id", racktest.Image),
			racktest.With("block_size", 512), racktest.With("size", 2*volume.GiB)),
			`{"disk_source":{"image_id":"` + racktest.Image + `","read_only":false,"type":"image"},` +
				`"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": racktest.Disk,
				"blockSize": "512"}},
		{"mkfsOptions", map[string]string{"mkfsOptions": "reservedPercent=0, bytesPerInode=16384"},
			nil, racktest.DiskOf("creating", racktest.With("description", volume.Tag{Name: "pvc-1",
				Cluster: "blue", MkfsOptions: "bytesPerInode=16384,reservedPercent=0"}.Description())),
			`{"disk_source":{"block_size":4096,"type":"blank"},"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": racktest.Disk,
				"blockSize": "4096", "mkfsOptions": "bytesPerInode=16384,reservedPercent=0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, append(test.before, racktest.Exchange{Want: postDisk, Status: 201,
				Body: test.answer,
				Check: func(t *testing.T, body []byte) {
					var got struct {
						Backend map[string]any `json:"disk_backend"`
					}
					if err := json.Unmarshal(body, &got); err != nil ||
						racktest.JSON(got.Backend) != test.want {
						t.Errorf("the body is %s, %v", body, err)
					}
				}})...)
			r := createRequest()
			r.Parameters = test.parameters
			answer, err := c.CreateVolume(t.Context(), r)
			must(t, err)
			got := racktest.JSON(answer.GetVolume().GetVolumeContext())
			if got != racktest.JSON(test.context) {
				t.Errorf("the context is %s", got)
			}
		})
	}
}

func TestCV18ARepeatedCreateAfterItsImageWasDeleted(t *testing.T) {
	r := createRequest()
	r.Parameters = map[string]string{"imageId": racktest.Image}
	made := racktest.DiskOf("detached", racktest.With("image_id", racktest.Image))
	if _, err := rackThat(t, racktest.NotFound.To(viewImage), racktest.OK(viewName,
		made)).CreateVolume(t.Context(),
		r); err != nil {
		t.Error(err)
	}
	_, err := rackThat(t, racktest.NotFound.To(viewImage), noName).CreateVolume(t.Context(), r)
	csitest.Want(t, err, codes.InvalidArgument, csierr.ImageNotFound)
}

func TestVolumesFromSnapshots(t *testing.T) {
	restore := func(edit ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
		r := createRequest()
		r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
		for _, e := range edit {
			e(r)
		}
		return r
	}
	in512 := func(r *csi.CreateVolumeRequest) {
		r.Parameters = map[string]string{"blockSize": "512"}
	}
	restored := racktest.DiskOf("creating", racktest.With("snapshot_id", racktest.Snapshot),
		racktest.With("block_size", 2048))
	ready := racktest.OK(viewSnap, racktest.SnapshotOf("ready"))
	tagged := func(blockSize int) racktest.Exchange {
		return racktest.OK(viewSnap, racktest.SnapshotOf("ready", racktest.With("description",
			volume.Tag{Name: "snap-1", Cluster: "blue", BlockSize: blockSize}.Description())))
	}
	restoredAs := func(state string, blockSize int) string {
		return racktest.DiskOf(state, racktest.With("snapshot_id", racktest.Snapshot),
			racktest.With("block_size", blockSize), racktest.With("description", volume.Tag{Name: "pvc-1",
				Cluster: "blue", BlockSize: 512}.Description()))
	}
	other := racktest.With("project_id", racktest.Disk)
	fromImage := createRequest()
	fromImage.Parameters = map[string]string{"imageId": racktest.Image}
	for _, test := range []struct {
		name   string
		req    *csi.CreateVolumeRequest
		lines  script
		code   codes.Code
		reason csierr.Reason
	}{
		{"D-18 is two requests", restore(), script{ready, created(postDisk, restored)}, codes.OK, ""},
		{"CV-14 an unknown snapshot", restore(), script{noSnap, ownProject, ownUser, noName},
			codes.NotFound,
			csierr.SnapshotNotFound},
		{"CV-18 a snapshot that went after the restore", restore(),
			script{noSnap, ownProject, ownUser, racktest.OK(viewName, racktest.DiskOf("detached",
				racktest.With("snapshot_id", racktest.Snapshot)))}, codes.OK, ""},
		{"a name that is taken and a snapshot that is gone", restore(),
			script{noSnap, ownProject, ownUser, racktest.OK(viewName, racktest.DiskOf("detached"))},
			codes.NotFound, csierr.SnapshotNotFound},
		{"CV-15 the snapshot's disk shows other blocks", restore(in512), script{ready, free},
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 the snapshot's tag tells other blocks", restore(in512), script{tagged(2048)},
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 the snapshot's tag tells the blocks", restore(in512), script{tagged(512),
			created(postDisk, restoredAs("creating", 512))}, codes.OK, ""},
		{"CV-15 a tag that was copied tells no blocks", restore(in512), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("ready", racktest.With("name", "by-hand"), racktest.With("description",
				volume.Tag{Name: "snap-1", Cluster: "blue", BlockSize: 512}.Description()))), free},
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 neither tag nor disk tells the blocks", restore(in512), script{ready, noDisk,
			ownProject, ownUser, noName},
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-18 neither tells the blocks of a volume that exists", restore(in512), script{ready,
			noDisk, ownProject, ownUser, racktest.OK(viewName, restoredAs("detached", 512))}, codes.OK, ""},
		{"CV-19 a volume that is shown with other blocks is not deleted", restore(in512),
			script{tagged(512), taken.To(postDisk), racktest.OK(viewName, restoredAs("detached", 2048))},
			codes.AlreadyExists, csierr.VolumeExists},
		{"CV-19 a volume in use that is shown with other blocks is not deleted", restore(in512),
			script{tagged(512), taken.To(postDisk), racktest.OK(viewName,
				restoredAs(racktest.AttachedHere, 2048))}, codes.AlreadyExists, csierr.VolumeExists},
		{"CV-15 a snapshot of another project", restore(), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("ready", other))}, codes.InvalidArgument, csierr.OtherProject},
		{"CV-15 an image of another project", fromImage, script{racktest.OK(viewImage,
			racktest.JSON(map[string]any{"id": racktest.Image, "size": volume.GiB, "block_size": 512,
				"project_id": racktest.Disk})), racktest.Refused.To(postDisk)}, codes.InvalidArgument,
			csierr.SourceIncompatible},
		{"a refusal for another reason", restore(), script{ready, racktest.Refused.To(postDisk)},
			codes.Internal, csierr.RackError},
		{"CV-16 a snapshot in the making", restore(), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("creating"))}, codes.FailedPrecondition, csierr.SnapshotNotReady},
		{"CV-16 a faulted snapshot", restore(), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("faulted"))}, codes.FailedPrecondition, csierr.SnapshotFaulted},
		{"CV-16 a destroyed snapshot", restore(), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("destroyed")), ownProject, ownUser, noName}, codes.NotFound,
			csierr.SnapshotNotFound},
		{"CV-17 a limit below the snapshot", restore(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(0, 9*volume.GiB)
		}), script{ready}, codes.OutOfRange, csierr.CapacityOutOfRange},
		{"a snapshot without a size", restore(), script{racktest.OK(viewSnap,
			racktest.SnapshotOf("ready", racktest.With("size", 0)))}, codes.Unavailable,
			csierr.RackResponseInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.lines...).CreateVolume(t.Context(), test.req)
			if test.code != codes.OK {
				csitest.Want(t, err, test.code, test.reason)
				return
			}
			must(t, err)
			csitest.SameMessage(t, answer.GetVolume().GetContentSource(),
				fromSnapshot(racktest.Snapshot)) // CV-23
		})
	}
}

func TestARestoredVolumeRecordsTheUUIDOfItsFilesystem(t *testing.T) {
	snapshot := func(m volume.Tag) string {
		return racktest.SnapshotOf("ready", racktest.With("description", m.Description()))
	}
	for _, test := range []struct{ name, snapshot, uuid string }{
		{"which filesystem, and how large it was", snapshot(volume.Tag{Name: "snap-1", Cluster: "blue",
			FilesystemUUID: racktest.Image}), racktest.Image},
		{"only how large it was, when the filesystem is not known", racktest.SnapshotOf("ready"), ""},
		{"only that of a snapshot made by hand", racktest.SnapshotOf("ready",
			racktest.With("description", "mine")), ""},
		{"only that of another cluster's", snapshot(volume.Tag{Name: "snap-1", Cluster: "red",
			FilesystemUUID: racktest.Image}), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := createRequest()
			r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
			_, err := rackThat(t, racktest.OK(viewSnap, test.snapshot), racktest.Exchange{Want: postDisk,
				Status: 201,
				Body:   racktest.DiskOf("creating", racktest.With("snapshot_id", racktest.Snapshot)),
				Check: func(t *testing.T, body []byte) {
					var got struct{ Description string }
					_ = json.Unmarshal(body, &got)
					want := volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginSnapshot,
						Use: volume.UseFilesystem, SourceBytes: 10 * volume.GiB, FilesystemUUID: test.uuid}
					if m, _ := volume.ParseTag(got.Description); m != want {
						t.Errorf("the tag is %+v, want %+v", m, want)
					}
				}}).CreateVolume(t.Context(), r)
			if err != nil {
				t.Error(err)
			}
		})
	}
}
