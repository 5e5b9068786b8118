package controller

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	postDisk   = "POST /v1/disks"
	deleteDisk = racktest.DeleteDisk
	viewDisk   = racktest.ViewDisk
	viewSnap   = "GET /v1/snapshots/" + racktest.Snapshot
	viewImage  = "GET /v1/images/" + racktest.Image
)

var viewName = "GET /v1/disks/" + ownName

var blank = &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: racktest.Disk,
	CapacityBytes: 10 * volume.GiB, VolumeContext: map[string]string{"diskId": racktest.Disk,
		"diskName": ownName, "blockSize": "4096"}}}

func created(want, body string) exchange {
	return exchange{Want: want, Status: 201, Body: body}
}

func tags(want volume.Tag) func(*testing.T, []byte) {
	return func(t *testing.T, body []byte) {
		var got struct{ Description string }
		must(t, json.Unmarshal(body, &got))
		if got.Description != want.Description() {
			t.Errorf("the tag is %s, want %s", got.Description, want.Description())
		}
	}
}

func accepted(want, body string) exchange {
	return exchange{Want: want, Status: 202, Body: body}
}

var (
	taken = racktest.Error(400, "ObjectAlreadyExists", `already exists: disk "x"`)
	full  = racktest.Error(507, "InsufficientCapacity", "Insufficient capacity: Storage Limit "+
		"Exceeded")
)

func TestCreateVolumeOfABlankDiskNeedsOneRequest(t *testing.T) { // B-14, D-13, D-20, D-21, D-25
	c := rackThat(t, exchange{Want: postDisk, Status: 201, Body: diskOf("creating"),
		Query: "project=" + racktest.ProjectID, Check: func(t *testing.T, body []byte) {
			var got map[string]any
			must(t, json.Unmarshal(body, &got))
			want := `{"description":"csi.oxide.computer ` +
				`{\"name\":\"pvc-1\",\"cluster\":\"blue\",\"origin\":\"blank\",` +
				`\"use\":\"filesystem\"}",` +
				`"disk_backend":{"disk_source":{"block_size":4096,"type":"blank"},` +
				`"type":"distributed"},` + `"name":"` + ownName + `","size":10737418240}`
			if racktest.JSON(got) != want {
				t.Errorf("D-20, D-21: got %s\nwant %s", racktest.JSON(got), want)
			}
		}})
	r := createRequest()
	r.Secrets = map[string]string{"password": "ignored"}
	csitest.SameMessage(t, csitest.Got(c.CreateVolume(t.Context(), r))(t), blank)
}

func TestCreateVolumeRecordsTheAccessTypesInTheTag(t *testing.T) {
	raw := &csi.VolumeCapability{AccessMode: csitest.Filesystem("").GetAccessMode(),
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	for use, capabilities := range map[string][]*csi.VolumeCapability{
		volume.UseBlock: {raw},
		volume.UseBoth:  {csitest.Filesystem("ext4"), raw},
	} {
		tag := volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginBlank, Use: use}
		post := created(postDisk, diskOf("creating", tagged(tag)))
		post.Check = tags(tag)
		r := createRequest()
		r.VolumeCapabilities = capabilities
		must(t, scripted(t, r, post))
	}
}

func TestPlacementChangesTheTopologyAndNotTheDisk(t *testing.T) { // D-61, CV-23
	var bodies []string
	post := created(postDisk, diskOf("creating"))
	post.Check = func(_ *testing.T, body []byte) { bodies = append(bodies, string(body)) }
	again := taken.To(postDisk)
	again.Check = post.Check
	c := rackThat(t, post, again, named("detached"), again, named("detached"))
	c.Topology, c.TopologyInstance = rackA, true
	elsewhere := csitest.Topologies("rack=a,instance=" + racktest.OtherInstance)
	for _, test := range []struct {
		placement string
		at, want  []*csi.Topology
	}{
		{"instance", instanceAt("rack=a,"), instanceAt("rack=a,")},
		{"instance", elsewhere, elsewhere}, // the scheduler chose another instance
		{"rack", elsewhere, csitest.Topologies("rack=a")},
	} {
		r := createRequest()
		r.Parameters = map[string]string{"placement": test.placement}
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: test.at, Preferred: test.at}
		made := csitest.Got(c.CreateVolume(t.Context(), r))(t).GetVolume()
		csitest.SameMessage(t, &csi.Volume{AccessibleTopology: made.GetAccessibleTopology()},
			&csi.Volume{AccessibleTopology: test.want})
		if _, has := made.GetVolumeContext()["placement"]; has {
			t.Errorf("the context is %v", made.GetVolumeContext())
		}
	}
	if len(bodies) != 3 || bodies[0] != bodies[1] || bodies[1] != bodies[2] ||
		strings.Contains(bodies[0], racktest.Instance) {
		t.Errorf("the rack was asked for %q", bodies)
	}
}

func TestRepeatedCreateReturnsTheDisk(t *testing.T) { // CV-18
	scriptedCalls{
		{"name taken (OX-1)", script{taken.To(postDisk), named("detached")}, ok},
		{"quota full", script{full.To(postDisk), named("detached")}, ok},
		{"refused", script{refusing(postDisk), ownProject, ownUser, named("detached")}, ok},
		{"attached by now", script{taken.To(postDisk), named(here)}, ok},
		{"being snapshotted", script{taken.To(postDisk), named("maintenance")}, ok},
	}.try(t, createRequest(), blank)
}

func TestRepeatedCreateForAnotherClaimReturnsTheDisk(t *testing.T) { // CV-18
	labelled := racktest.OwnTag
	labelled.Claim = "shop/data"
	c := rackThat(t, exchange{Want: postDisk, Status: 201, Body: diskOf("creating"),
		Check: tags(labelled)}, taken.To(postDisk), named("detached", tagged(labelled)))
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

func TestCreateFailsIfADifferentDiskHasTheName(t *testing.T) { // CV-19
	for name, change := range map[string]edit{
		"another size":       with("size", 20*volume.GiB),
		"other blocks":       with("block_size", 512),
		"another type":       with("disk_type", "local"),
		"a snapshot's":       with("snapshot_id", racktest.Snapshot),
		"an image's":         with("image_id", racktest.Image),
		"read-only":          with("read_only", true),
		"made by hand":       with("description", "mine"),
		"of another cluster": tagged(volume.Tag{Name: "pvc-1", Cluster: "red"}),
		"a collision":        tagged(volume.Tag{Name: "pvc-2", Cluster: "blue"}),
		"for raw access":     tagged(volume.Tag{Name: "pvc-1", Cluster: "blue", Use: volume.UseBlock}),
		"with mkfsOptions": tagged(volume.Tag{Name: "pvc-1", Cluster: "blue",
			MkfsOptions: "reservedPercent=0"}),
	} {
		t.Run(name, func(t *testing.T) {
			r := createRequest()
			r.CapacityRange = csitest.Range(10*volume.GiB, 10*volume.GiB)
			fails(csierr.VolumeExists)(t, scripted(t, r, taken.To(postDisk), named("detached", change)))
		})
	}
}

func TestCreateWaitsForADiskInCreation(t *testing.T) { // CV-20
	c := rackThat(t, taken.To(postDisk), named("creating"), shown("creating"), free,
		taken.To(postDisk), named("creating"))
	must(t, csitest.Call(t.Context(), c, createRequest()))
	ctx, cancel := context.WithTimeout(t.Context(), answerMargin)
	defer cancel()
	fails(csierr.DiskBusy)(t, csitest.Call(ctx, c, createRequest()))
}

func TestCreateVolumeReturnsTheReasonOfAFailure(t *testing.T) {
	faulted := slices.Clip(script{created(postDisk, diskOf("faulted"))})
	scriptedCalls{
		{"a disk of the name is faulted (CV-21)", script{taken.To(postDisk), named("faulted")},
			coded(codes.Aborted, csierr.DiskFaulted)},
		{"a disk is made faulted, and deleted (CV-21)", append(faulted, noInstances, shown("faulted"),
			deleted), coded(codes.Internal, csierr.DiskFaulted, "deleted again")},
		{"a disk is made faulted and does not stay so (CV-21)", script{faulted[0], noInstances, free},
			fails(csierr.DiskBusy)},
		{"a disk that is made faulted and that an instance has (CV-21)", append(faulted, oneInstance,
			listing(diskOf("faulted"))), fails(csierr.EffectUnknown, racktest.Instance)},
		{"a disk that is made faulted and cannot be deleted (CV-21)", append(faulted, noInstances,
			shown("faulted"), forbidden.To(deleteDisk)), fails(csierr.EffectUnknown, "Forbidden")},
		{"a full quota (CV-22, B-44)", script{full.To(postDisk), noName}, fails(csierr.RackFull)},
		{"a project that only the create does not find", script{missing(postDisk),
			ownProject, ownUser, noName}, coded(codes.NotFound, csierr.ProjectNotFound)},
		{"a missing project", script{missing(postDisk), noProject},
			fails(csierr.EffectUnknown, "ProjectNotFound")},
		{"a project that cannot be read", script{later.To(racktest.ViewProject)},
			fails(csierr.RackUnavailable)},
		{"a create that the token's user may not request", script{forbidden.To(postDisk), ownProject,
			ownUser, noName}, fails(csierr.RoleMissing)},
		{"a token that is refused when the disk is there", script{racktest.Error(401, "Unauthorized",
			"no").To(postDisk), ownProject, ownUser, later.To(viewName)}, fails(csierr.RackUnavailable)},
		{"a disk that was being created is gone (CV-20)", script{taken.To(postDisk), named("creating"),
			noDisk}, fails(csierr.DiskBusy)},
		{"a disk that had the name is gone (CV-20)", script{taken.To(postDisk), noName},
			fails(csierr.DiskBusy)},
	}.try(t, createRequest(), nil)
}

func TestCreateRejectsInvalidResponses(t *testing.T) {
	for name, change := range map[string]edit{
		"no id":         with("id", "7"),
		"another name":  with("name", "csi-0000000000000000"),
		"other project": with("project_id", racktest.Disk),
		"no name":       with("name", ""),
		"another size":  with("size", 9*volume.GiB),
		"no size":       with("size", 0),
		"odd blocks":    with("block_size", 520),
		"attached":      with("state", racktest.StateOf("attached "+racktest.Instance)),
		"no state":      with("state", nil),
		"another tag":   with("description", "x"),
		"far too large": with("size", uint64(1)<<63),
	} {
		t.Run(name, func(t *testing.T) {
			answer := created(postDisk, diskOf("creating", change))
			fails(csierr.RackResponseInvalid)(t, scripted(t, createRequest(), answer, noName))
			// If the rack created the disk in spite of its answer, the next call finds the disk.
			must(t, scripted(t, createRequest(), answer, named("detached")))
		})
	}
	for name, change := range map[string]edit{
		"no time":         with("time_created", nil),
		"another name":    with("name", volume.SnapshotName("blue", "snap-2")),
		"another volume":  with("disk_id", racktest.Image),
		"another project": with("project_id", racktest.Disk),
	} {
		t.Run("a snapshot with "+name, func(t *testing.T) {
			lines := script{free, created(postSnap, snapshotOf("ready", change)), noSnapName}
			fails(csierr.RackResponseInvalid)(t, scripted(t, snapshotRequest(), lines...))
			lines[2] = snapNamed("ready")
			must(t, scripted(t, snapshotRequest(), lines...))
		})
	}
}

func TestCreateReadsTheDiskByNameAfterALostAnswer(t *testing.T) { // OX-8
	scriptedCalls{
		{"the disk is there", script{named("detached")}, ok},
		{"it is being made", script{named("creating"), free}, ok},
		{"another has the name", script{named("detached", with("description", "mine"))},
			fails(csierr.EffectUnknown)},
		{"a disk that is faulted", script{named("faulted")}, coded(codes.Aborted, csierr.DiskFaulted)},
		{"it cannot be read", script{forbidden.To(viewName)}, fails(csierr.EffectUnknown)},
		{"no disk has the name", script{noName}, fails(csierr.RackUnavailable)},
	}.after(lostCreate).try(t, createRequest(), nil)
}

func TestCreatePassesParametersToTheRackOrTheVolumeContext(t *testing.T) {
	for _, test := range []struct {
		name       string
		parameters map[string]string
		before     script
		answer     string
		want       string            // text in the request's body
		context    map[string]string // what differs from a blank volume's
	}{
		{"blocks of 512 bytes (D-23)", map[string]string{"blockSize": "512"}, nil,
			diskOf("creating", with("block_size", 512)),
			`{"disk_source":{"block_size":512,"type":"blank"},"type":"distributed"}`,
			map[string]string{"blockSize": "512"}},
		{"a local disk", map[string]string{"diskType": "local"}, nil, diskOf("creating",
			with("disk_type", "local")), `{"type":"local"}`, nil},
		{"an image", map[string]string{"imageId": racktest.Image}, script{reply(viewImage,
			racktest.JSON(map[string]any{"id": racktest.Image, "size": volume.GiB + 1, "block_size": 512,
				"project_id": nil}))}, diskOf("creating", with("image_id", racktest.Image),
			with("block_size", 512), with("size", 2*volume.GiB)),
			`{"disk_source":{"image_id":"` + racktest.Image + `","read_only":false,"type":"image"},` +
				`"type":"distributed"}`,
			map[string]string{"blockSize": "512"}},
		{"mkfsOptions", map[string]string{"mkfsOptions": "reservedPercent=0, bytesPerInode=16384"},
			nil, diskOf("creating", tagged(volume.Tag{Name: "pvc-1",
				Cluster: "blue", MkfsOptions: "bytesPerInode=16384,reservedPercent=0"})),
			`{"disk_source":{"block_size":4096,"type":"blank"},"type":"distributed"}`,
			map[string]string{"mkfsOptions": "bytesPerInode=16384,reservedPercent=0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, append(test.before, exchange{Want: postDisk, Status: 201,
				Body: test.answer,
				Check: func(t *testing.T, body []byte) {
					var got struct {
						Backend map[string]any `json:"disk_backend"`
					}
					if err := json.Unmarshal(body, &got); err != nil || racktest.JSON(got.Backend) != test.want {
						t.Errorf("the body is %s, %v", body, err)
					}
				}})...)
			r := createRequest()
			r.Parameters = test.parameters
			answer := csitest.Got(c.CreateVolume(t.Context(), r))(t)
			want := maps.Clone(blank.GetVolume().GetVolumeContext())
			maps.Copy(want, test.context)
			if got := answer.GetVolume().GetVolumeContext(); !maps.Equal(got, want) {
				t.Errorf("the context is %v", got)
			}
		})
	}
}

func TestRepeatedCreateReturnsTheDiskAfterItsImageIsDeleted(t *testing.T) { // CV-18
	r := parameter("imageId", racktest.Image)
	scriptedCalls{
		{"it was made", script{named("detached", with("image_id", racktest.Image))}, ok},
		{"it was not made", script{noName}, fails(csierr.ImageNotFound)},
	}.after(missing(viewImage)).try(t, r, nil)
}

func TestCreateVolumeRestoresASnapshotOrReturnsTheReason(t *testing.T) { // CV-23
	restored := restoring(createRequest())
	small := restoring(createRequest())
	small.CapacityRange = csitest.Range(0, 9*volume.GiB)
	in512 := restoring(parameter("blockSize", "512"))
	imagedIn512 := parameter("blockSize", "512")
	imagedIn512.Parameters["imageId"] = racktest.Image
	made := diskOf("creating", with("snapshot_id", racktest.Snapshot), with("block_size", 2048))
	ready := snap("ready")
	inBlocks := func(blockSize int) exchange {
		return snap("ready", tagged(volume.Tag{Name: "snap-1", Cluster: "blue", BlockSize: blockSize}))
	}
	restoredAs := func(state string, blockSize int) string {
		return diskOf(state, with("snapshot_id", racktest.Snapshot), with("block_size", blockSize),
			tagged(volume.Tag{Name: "pvc-1", Cluster: "blue", BlockSize: 512}))
	}
	for _, test := range []struct {
		name  string
		req   *csi.CreateVolumeRequest
		lines script
		ends  func(*testing.T, error)
	}{
		{"is two requests (D-18)", restored, script{inBlocks(2048), created(postDisk, made)}, ok},
		{"an unknown snapshot (CV-14)", restored, script{noSnap, ownProject, ownUser, noName},
			fails(csierr.SnapshotNotFound)},
		{"a snapshot that went after the restore (CV-18)", restored, script{noSnap, ownProject, ownUser,
			named("detached", with("snapshot_id", racktest.Snapshot))}, ok},
		{"a name that is taken and a snapshot that is gone", restored, script{noSnap, ownProject,
			ownUser, named("detached")}, fails(csierr.SnapshotNotFound)},
		{"the snapshot's disk shows other blocks (CV-15)", in512, script{ready, free},
			fails(csierr.SourceIncompatible)},
		{"the snapshot's tag tells other blocks (CV-15)", in512, script{inBlocks(2048)},
			fails(csierr.SourceIncompatible)},
		{"the snapshot's tag tells the blocks (CV-15)", in512, script{inBlocks(512),
			created(postDisk, restoredAs("creating", 512))}, ok},
		{"a tag that was copied tells no blocks (CV-15)", in512, script{snap("ready", with("name",
			"by-hand"), tagged(volume.Tag{Name: "snap-1", Cluster: "blue",
			BlockSize: 512})), free}, fails(csierr.SourceIncompatible)},
		{"neither tag nor disk tells the blocks (CV-15)", in512, script{ready, noDisk, ownProject,
			ownUser, noName}, fails(csierr.SourceIncompatible)},
		{"neither tells the blocks of a volume that exists (CV-18)", in512, script{ready,
			noDisk, ownProject, ownUser, reply(viewName, restoredAs("detached", 512))}, ok},
		{"a volume that is shown with other blocks is not deleted (CV-19)", in512, script{inBlocks(512),
			taken.To(postDisk), reply(viewName, restoredAs("detached", 2048))}, fails(csierr.VolumeExists)},
		{"a volume in use that is shown with other blocks is not deleted (CV-19)", in512,
			script{inBlocks(512), taken.To(postDisk), reply(viewName, restoredAs(here, 2048))},
			fails(csierr.VolumeExists)},
		{"another image in the response", parameter("imageId", racktest.Image), script{reply(
			viewImage, `{"id":"`+racktest.Disk+`","size":1}`)}, fails(csierr.RackResponseInvalid)},
		{"an image with other blocks (CV-15)", imagedIn512, script{reply(viewImage, racktest.JSON(
			map[string]any{"id": racktest.Image, "size": volume.GiB, "block_size": 4096}))},
			fails(csierr.SourceIncompatible)},
		{"an image of another project (CV-15)", parameter("imageId", racktest.Image),
			script{reply(viewImage, racktest.JSON(map[string]any{"id": racktest.Image,
				"size": volume.GiB, "block_size": 512, "project_id": racktest.Disk})),
				refusing(postDisk)}, fails(csierr.SourceIncompatible)},
		{"a refusal for another reason", restored, script{ready, refusing(postDisk)},
			fails(csierr.RackError)},
		{"a snapshot in the making (CV-16)", restored, script{snap("creating")},
			fails(csierr.SnapshotNotReady)},
		{"a faulted snapshot (CV-16)", restored, script{snap("faulted")}, fails(csierr.SnapshotFaulted)},
		{"a destroyed snapshot (CV-16)", restored, script{snap("destroyed"), ownProject, ownUser, noName},
			fails(csierr.SnapshotNotFound)},
		{"a limit below the snapshot (CV-17)", small, script{ready}, fails(csierr.CapacityOutOfRange)},
		{"a snapshot without a size", restored, script{snap("ready", with("size", 0))},
			fails(csierr.RackResponseInvalid)},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.lines...).CreateVolume(t.Context(), test.req)
			if test.ends(t, err); err == nil {
				csitest.SameMessage(t, answer.GetVolume().GetContentSource(),
					fromSnapshot(racktest.Snapshot)) // CV-23
			}
		})
	}
}

func TestCreateVolumeRecordsTheSnapshotsFilesystemUUID(t *testing.T) {
	for _, test := range []struct{ name, snapshot, uuid string }{
		{"the filesystem's UUID and the source's size", snapshotOf("ready", tagged(volume.Tag{
			Name: "snap-1", Cluster: "blue", FilesystemUUID: racktest.Image})), racktest.Image},
		{"only the source's size, if the snapshot has no UUID", snapshotOf("ready"), ""},
		{"only the source's size, if the snapshot was made by hand", snapshotOf("ready", with(
			"description", "mine")), ""},
		{"only the source's size, if the snapshot is another cluster's", snapshotOf("ready", tagged(
			volume.Tag{Name: "snap-1", Cluster: "red", FilesystemUUID: racktest.Image})), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := restoring(createRequest())
			want := volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginSnapshot,
				Use: volume.UseFilesystem, SourceBytes: 10 * volume.GiB, FilesystemUUID: test.uuid}
			must(t, scripted(t, r, reply(viewSnap, test.snapshot), exchange{Want: postDisk, Status: 201,
				Body: diskOf("creating", with("snapshot_id", racktest.Snapshot)), Check: tags(want)}))
		})
	}
}

func TestDeleteVolumeDeletesOnlyOwnUnattachedDisks(t *testing.T) {
	byCapitals := &csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(racktest.Disk)}
	disk := func(tagOf, nameOf string) script { // the clusters in its tag and in its name
		return script{shown("detached", tagged(volume.Tag{Name: "pvc-1", Cluster: tagOf}),
			with("name", volume.DiskName(nameOf, "pvc-1")))}
	}
	scriptedCalls{
		{"a disk that is gone (DV-2)", gone, ok},
		{"a disk that the rack calls destroyed (DV-2)", script{shown("destroyed"), ownProject, ownUser,
			shown("destroyed")}, ok},
		{"a disk that cannot be seen (OX-6)", script{noDisk, noProject}, unseen},
		{"a disk made by hand (D-69)", script{shown("detached", with("description", "the boot disk"))},
			fails(csierr.DiskNotOurs, "Retain")},
		{"another cluster's disk (E-17)", disk("red", "red"), fails(csierr.DiskNotOurs, `"red"`)},
		{"a disk without a cluster (E-17)", disk("", ""), fails(csierr.DiskNotOurs,
			`cluster "", and OXIDE_CLUSTER_ID is "blue"`)},
		{"another cluster's disk with a tag of this one (E-17)", disk("blue", "red"),
			fails(csierr.DiskNotOurs, "another name")},
		{"a disk without a cluster with a tag of this one (E-17)", disk("blue", ""),
			fails(csierr.DiskNotOurs, "another name")},
		{"an attached disk made by hand (D-69)", script{shown(here, with("description", ""))},
			fails(csierr.DiskNotOurs)},
		{"a disk that the rack began to delete and gave up", script{shown("faulted", with("name",
			"deleted-"+racktest.Disk)), noInstances, shown("faulted"), deleted}, ok},
		{"a faulted disk that an instance still has", script{shown("faulted"), oneInstance,
			listing(diskOf("faulted"))}, fails(csierr.DiskAttached, racktest.Instance)},
		{"a faulted disk that no instance has", script{shown("faulted"), oneInstance, alone,
			shown("faulted"), deleted}, ok},
		{"a faulted disk whose holders are not known", script{shown("faulted"), oneInstance,
			later.To(beside)}, fails(csierr.RackUnavailable)},
		{"a faulted disk that cannot be read again", script{shown("faulted"), noInstances,
			later.To(viewDisk)}, fails(csierr.RackUnavailable)},
		{"an attached disk (DV-3)", script{held}, fails(csierr.DiskAttached, racktest.Instance)},
		{"a disk being detached (DV-3)", script{shown(detaching)}, fails(csierr.DiskAttached,
			"detaching")},
		{"a disk in a snapshot (DV-3)", script{shown("maintenance"), noDelete, shown("maintenance")},
			fails(csierr.DiskBusy)},
		{"a disk whose import was not finalized (DV-3)", script{shown("import_ready"), noDelete,
			shown("import_ready")}, fails(csierr.DiskImporting, "finalize")},
		{"a faulted disk that the rack keeps", script{shown("faulted"), noInstances, shown("faulted"),
			noDelete, shown("faulted")}, fails(csierr.RackError)},
	}.try(t, byCapitals, nil)
	scriptedCalls{
		{"is a read and one request", script{deleted}, ok},
		{"a disk that is deleted between read and request (DV-2)", script{missing(
			deleteDisk), noDisk, ownProject, ownUser, noDisk}, ok},
		{"a disk that exists although the rack does not find it (OX-6)",
			script{missing(deleteDisk), free}, fails(csierr.DiskBusy)},
		{"a disk that cannot be seen now (OX-6)", script{missing(deleteDisk),
			noDisk, noProject}, unseen},
		{"a disk with dependents (DV-4)", script{racktest.Error(409, "Conflict",
			"disk has dependents").To(deleteDisk), free}, fails(csierr.Conflict)},
		{"a server that is no rack answers (DV-6)", script{{Want: deleteDisk, Status: 200,
			Body: "<html>welcome"}}, fails(csierr.RackUnavailable)},
	}.after(free).try(t, byCapitals, nil)
	scriptedCalls{
		{"a disk that is attached meanwhile (DV-3)", script{held}, fails(csierr.DiskAttached)},
		{"a disk that is free again", script{free}, fails(csierr.DiskBusy)},
		{"a disk that cannot be read", script{later.To(viewDisk)}, fails(csierr.RackUnavailable)},
	}.after(free, noDelete).try(t, byCapitals, nil)
}
