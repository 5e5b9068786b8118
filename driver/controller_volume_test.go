package driver

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

const (
	postDisk    = "POST /v1/disks"
	viewProject = "GET /v1/projects/" + testProject
	deleteDisk  = "DELETE /v1/disks/" + testDisk
	viewSnap    = "GET /v1/snapshots/" + testSnapshot
	viewImage   = "GET /v1/images/" + testImage
)

// viewName is the request that looks up the disk of pvc-1 by its name.
var viewName = "GET /v1/disks/" + volume.DiskName("blue", "pvc-1")

func ok(want, body string) exchange { return exchange{want: want, status: 200, body: body} }

func created(want, body string) exchange { return exchange{want: want, status: 201, body: body} }

func accepted(want, body string) exchange { return exchange{want: want, status: 202, body: body} }

var (
	taken = rackError(400, "ObjectAlreadyExists", `already exists: disk "x"`)
	full  = rackError(507, "InsufficientCapacity", "Insufficient capacity: Storage Limit Exceeded")
	lost  = rackError(404, "ObjectNotFound", "not found: it")
	not   = rackError(400, "InvalidRequest", "the rack says no")
)

func TestABlankVolumeIsOneRequest(t *testing.T) {
	c := rackThat(t, exchange{want: postDisk, status: 201, body: diskOf("creating"),
		query: "project=" + testProject, check: func(t *testing.T, body []byte) {
			var got map[string]any
			if err := json.Unmarshal(body, &got); err != nil {
				t.Fatal(err)
			}
			want := `{"description":"csi.oxide.computer ` +
				`{\"name\":\"pvc-1\",\"cluster\":\"blue\",\"origin\":\"blank\",` +
				`\"use\":\"filesystem\"}",` +
				`"disk_backend":{"disk_source":{"block_size":4096,"type":"blank"},` +
				`"type":"distributed"},` +
				`"name":"` + volume.DiskName("blue", "pvc-1") + `","size":10737418240}`
			if asJSON(got) != want {
				t.Errorf("D-20, D-21: got %s\nwant %s", asJSON(got), want)
			}
		}})
	answer, err := c.CreateVolume(t.Context(), createRequest())
	if err != nil {
		t.Fatal(err)
	}
	sameMessage(t, answer, &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: testDisk, CapacityBytes: 10 * volume.GiB,
		VolumeContext: map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": testDisk,
			"blockSize": "4096"},
	}})
}

func TestCV18ARepeatedCreateFindsTheDisk(t *testing.T) {
	for name, refusal := range map[string]exchange{"OX-1 name taken": taken, "quota full": full} {
		t.Run(name, func(t *testing.T) {
			for _, state := range []string{"detached", "attached " + testInstance, "maintenance"} {
				c := rackThat(t, refusal.to(postDisk), ok(viewName, diskOf(state)))
				answer, err := c.CreateVolume(t.Context(), createRequest())
				if err != nil || answer.GetVolume().GetVolumeId() != testDisk ||
					answer.GetVolume().GetVolumeContext()["diskName"] != volume.DiskName("blue", "pvc-1") {
					t.Errorf("%s: got %v, %v", state, answer, err)
				}
			}
		})
	}
}

func TestCV19AnotherVolumeOfTheNameIsTold(t *testing.T) {
	for name, edit := range map[string]func(map[string]any){
		"another size": with("size", 20*volume.GiB),
		"other blocks": with("block_size", 512),
		"another type": with("disk_type", "local"),
		"a snapshot's": with("snapshot_id", testSnapshot),
		"an image's":   with("image_id", testImage),
		"read-only":    with("read_only", true),
		"made by hand": with("description", "mine"),
		"of another cluster": with("description", volume.Tag{Name: "pvc-1",
			Cluster: "red"}.Description()),
		"a collision": with("description", volume.Tag{Name: "pvc-2",
			Cluster: "blue"}.Description()),
		"for raw access": with("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
			Use: volume.UseBlock}.Description()),
		"with mkfsOptions": with("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
			MkfsOptions: "reservedPercent=0"}.Description()),
	} {
		t.Run(name, func(t *testing.T) {
			r := createRequest()
			r.CapacityRange = csitest.Range(10*volume.GiB, 10*volume.GiB)
			c := rackThat(t, taken.to(postDisk), ok(viewName, diskOf("detached", edit)))
			_, err := c.CreateVolume(t.Context(), r)
			csitest.Want(t, err, codes.AlreadyExists, csierr.VolumeExists)
		})
	}
}

func TestCV20ADiskInTheMakingIsAwaited(t *testing.T) {
	view := "GET /v1/disks/" + testDisk
	c := rackThat(t, taken.to(postDisk), ok(viewName, diskOf("creating")),
		ok(view, diskOf("creating")), ok(view, diskOf("detached")))
	if _, err := c.CreateVolume(t.Context(), createRequest()); err != nil {
		t.Error(err)
	}

	c = rackThat(t, taken.to(postDisk), ok(viewName, diskOf("creating")))
	ctx, cancel := context.WithTimeout(t.Context(), answerMargin+firstLook/2)
	defer cancel()
	_, err := c.CreateVolume(ctx, createRequest())
	csitest.Want(t, err, codes.Aborted, csierr.DiskBusy)

	// Its making came to nothing.
	c = rackThat(t, taken.to(postDisk), ok(viewName, diskOf("creating")), lost.to(view))
	_, err = c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Aborted, csierr.DiskBusy)
	c = rackThat(t, taken.to(postDisk), lost.to(viewName))
	_, err = c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Aborted, csierr.DiskBusy)
}

func TestCV21AFaultedDiskIsNoVolume(t *testing.T) {
	c := rackThat(t, taken.to(postDisk), ok(viewName, diskOf("faulted")))
	_, err := c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Internal, csierr.DiskFaulted)
	c = rackThat(t, created(postDisk, diskOf("faulted")))
	_, err = c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Internal, csierr.DiskFaulted)
}

func TestCV22NoRoom(t *testing.T) {
	c := rackThat(t, full.to(postDisk), lost.to(viewName))
	_, err := c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.ResourceExhausted, csierr.RackFull)
}

func TestALostAnswerIsUnavailableAndTheRetryConverges(t *testing.T) {
	c := rackThat(t, exchange{want: postDisk, cut: true},
		taken.to(postDisk), ok(viewName, diskOf("detached")))
	_, err := c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
	if _, err := c.CreateVolume(t.Context(), createRequest()); err != nil {
		t.Error(err)
	}
}

func TestAnAnswerThatCannotBeTrueIsNotBelieved(t *testing.T) {
	for name, edit := range map[string]func(map[string]any){
		"no id":           with("id", "7"),
		"another name":    with("name", "csi-0000000000000000"),
		"no name":         with("name", ""),
		"another size":    with("size", 9*volume.GiB),
		"no size":         with("size", 0),
		"other blocks":    with("block_size", 512),
		"odd blocks":      with("block_size", 520),
		"another type":    with("disk_type", "local"),
		"attached":        with("state", stateOf("attached "+testInstance)),
		"no state":        with("state", nil),
		"read-only":       with("read_only", true),
		"another source":  with("snapshot_id", testSnapshot),
		"another mark":    with("description", "x"),
		"far too large":   with("size", uint64(1)<<63),
		"of another name": with("description", volume.Tag{Name: "pvc-9", Cluster: "blue"}.Description()),
	} {
		t.Run(name, func(t *testing.T) {
			answer := created(postDisk, diskOf("creating", edit))
			_, err := rackThat(t, answer, lost.to(viewName)).CreateVolume(t.Context(),
				createRequest())
			csitest.Want(t, err, codes.Unavailable, csierr.EffectUnknown)
			if !strings.Contains(err.Error(), string(csierr.RackAnswerWrong)) {
				t.Errorf("%v does not say why", err)
			}
			// What was made all the same is found.
			if _, err := rackThat(t, answer, ok(viewName, diskOf("detached"))).CreateVolume(
				t.Context(), createRequest()); err != nil {
				t.Error(err)
			}
		})
	}
}

// gaveUp are answers that leave open whether what was asked for was done.
var gaveUp = map[string]exchange{
	"HTTP 500": rackError(500, "Internal", "Internal Server Error"),
	"HTTP 408": {status: 408, body: "<html>timeout</html>"},
	"HTTP 520": {status: 520, body: "<html>the origin is odd</html>"},
	"HTTP 302": {status: 302, body: ""},
	"HTTP 503": rackError(503, "ServiceNotAvailable", "Service Unavailable"),
}

func TestOX8AnAnswerThatLeavesACreateOpenIsResolvedByTheName(t *testing.T) {
	restored := func(blockSize int) func(map[string]any) {
		return func(disk map[string]any) {
			disk["snapshot_id"], disk["block_size"] = testSnapshot, blockSize
			disk["description"] = volume.Tag{Name: "pvc-1", Cluster: "blue", BlockSize: 512}.Description()
		}
	}
	for name, answer := range gaveUp {
		for _, test := range []struct {
			name   string
			found  []exchange
			code   codes.Code
			reason csierr.Reason
		}{
			{"the disk is there", []exchange{ok(viewName, diskOf("detached"))}, codes.OK, ""},
			{"it is being made", []exchange{ok(viewName, diskOf("creating")),
				ok(viewDisk, diskOf("detached"))}, codes.OK, ""},
			{"another has the name", []exchange{ok(viewName, diskOf("detached",
				with("description", "mine")))}, codes.AlreadyExists, csierr.VolumeExists},
			{"a disk that is faulted", []exchange{ok(viewName, diskOf("faulted"))},
				codes.Unavailable, csierr.EffectUnknown},
			{"it cannot be looked at", []exchange{rackError(403, "Forbidden",
				"Forbidden").to(viewName)}, codes.Unavailable, csierr.EffectUnknown},
			{"one that was never handed out", []exchange{ok(viewName, diskOf("detached",
				restored(4096))), ok(viewDisk, diskOf("detached", restored(4096))),
				{want: deleteDisk, status: 204}}, codes.Aborted, csierr.DiskBusy},
		} {
			t.Run(name+", "+test.name, func(t *testing.T) {
				_, err := rackThat(t, append([]exchange{answer.to(postDisk)}, test.found...)...).
					CreateVolume(t.Context(), createRequest())
				scene{code: test.code, reason: test.reason}.verify(t, err)
			})
		}
		t.Run(name+", no disk has the name", func(t *testing.T) {
			_, err := rackThat(t, answer.to(postDisk), lost.to(viewName)).CreateVolume(t.Context(),
				createRequest())
			if got := grpcCode(err); got != codes.Unavailable {
				t.Errorf("got %v, want Unavailable: the rack may still make it", err)
			}
		})
	}
}

func TestAProjectThatIsNotThere(t *testing.T) {
	c := rackThat(t, lost.to(postDisk))
	_, err := c.CreateVolume(t.Context(), createRequest())
	csitest.Want(t, err, codes.NotFound, csierr.ProjectNotFound)
}

func TestParametersReachTheDisk(t *testing.T) {
	for _, test := range []struct {
		name       string
		parameters map[string]string
		before     []exchange
		answer     string
		want       string // in the request's body
		context    map[string]string
	}{
		{"D-23 blocks of 512 bytes", map[string]string{"blockSize": "512"}, nil,
			diskOf("creating", with("block_size", 512)),
			`{"disk_source":{"block_size":512,"type":"blank"},"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": testDisk,
				"blockSize": "512"}},
		{"a local disk", map[string]string{"diskType": "local"}, nil,
			diskOf("creating", with("disk_type", "local")), `{"type":"local"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": testDisk,
				"blockSize": "4096"}},
		{"an image", map[string]string{"imageId": testImage}, []exchange{ok(viewImage,
			asJSON(map[string]any{
				"id": testImage, "size": volume.GiB + 1, "block_size": 512, "project_id": nil}))},
			diskOf("creating", with("image_id", testImage), with("block_size", 512),
				with("size", 2*volume.GiB)),
			`{"disk_source":{"image_id":"` + testImage + `","read_only":false,"type":"image"},` +
				`"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": testDisk,
				"blockSize": "512"}},
		{"mkfsOptions", map[string]string{"mkfsOptions": "reservedPercent=0, bytesPerInode=16384"},
			nil,
			diskOf("creating", with("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
				MkfsOptions: "bytesPerInode=16384,reservedPercent=0"}.Description())),
			`{"disk_source":{"block_size":4096,"type":"blank"},"type":"distributed"}`,
			map[string]string{"diskName": volume.DiskName("blue", "pvc-1"), "diskId": testDisk,
				"blockSize":   "4096",
				"mkfsOptions": "bytesPerInode=16384,reservedPercent=0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, append(test.before, exchange{want: postDisk, status: 201,
				body: test.answer,
				check: func(t *testing.T, body []byte) {
					var got struct {
						Backend map[string]any `json:"disk_backend"`
					}
					if err := json.Unmarshal(body, &got); err != nil ||
						asJSON(got.Backend) != test.want {
						t.Errorf("the body is %s, %v", body, err)
					}
				}})...)
			r := createRequest()
			r.Parameters = test.parameters
			answer, err := c.CreateVolume(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if got := asJSON(answer.GetVolume().GetVolumeContext()); got != asJSON(test.context) {
				t.Errorf("the context is %s", got)
			}
		})
	}
}

func TestCV18AnImageThatWentAfterTheVolumeWasMade(t *testing.T) {
	r := createRequest()
	r.Parameters = map[string]string{"imageId": testImage}
	made := diskOf("detached", with("image_id", testImage))
	if _, err := rackThat(t, lost.to(viewImage), ok(viewName, made)).CreateVolume(t.Context(),
		r); err != nil {
		t.Error(err)
	}
	_, err := rackThat(t, lost.to(viewImage), lost.to(viewName)).CreateVolume(t.Context(), r)
	csitest.Want(t, err, codes.InvalidArgument, csierr.ImageNotFound)
}

func TestVolumesFromSnapshots(t *testing.T) {
	restore := func(edit ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
		r := createRequest()
		r.VolumeContentSource = fromSnapshot(testSnapshot)
		for _, e := range edit {
			e(r)
		}
		return r
	}
	in512 := func(r *csi.CreateVolumeRequest) {
		r.Parameters = map[string]string{"blockSize": "512"}
	}
	restored := diskOf("creating", with("snapshot_id", testSnapshot), with("block_size", 2048))
	ready := ok(viewSnap, snapshotOf("ready"))
	other := "99999999-aaaa-4bbb-8ccc-222222222222"
	for _, test := range []struct {
		name   string
		req    *csi.CreateVolumeRequest
		lines  []exchange
		code   codes.Code
		reason csierr.Reason
	}{
		{"D-18 is two requests", restore(), []exchange{ready, created(postDisk, restored)},
			codes.OK, ""},
		{"CV-14 an unknown snapshot", restore(), []exchange{lost.to(viewSnap), lost.to(viewName)},
			codes.NotFound, csierr.SnapshotNotFound},
		{"CV-18 a snapshot that went after the restore", restore(), []exchange{lost.to(viewSnap),
			ok(viewName, diskOf("detached", with("snapshot_id", testSnapshot)))}, codes.OK, ""},
		{"a name that is taken and a snapshot that is gone", restore(),
			[]exchange{lost.to(viewSnap),
				ok(viewName, diskOf("detached"))}, codes.NotFound, csierr.SnapshotNotFound},
		{"CV-15 the snapshot's disk shows other blocks", restore(in512), []exchange{ready,
			ok(viewDisk, diskOf("detached"))}, codes.InvalidArgument, csierr.SourceIncompatible},
		{"CV-15 only the new disk shows other blocks, and is deleted", restore(in512),
			[]exchange{ready,
				lost.to(viewDisk), created(postDisk, restored), ok(viewDisk, restored),
				{want: deleteDisk, status: 204}}, codes.InvalidArgument, csierr.SourceIncompatible},
		{"another disk's answer, whose disk is not deleted", restore(in512), []exchange{ready,
			lost.to(viewDisk), created(postDisk, diskOf("detached", with("snapshot_id", testSnapshot),
				with("block_size", 2048), with("name", "somebodys-disk"))), lost.to(viewName)},
			codes.Unavailable, csierr.EffectUnknown},
		{"a disk in use in the answer, which is not deleted", restore(in512), []exchange{ready,
			lost.to(viewDisk), created(postDisk, diskOf("attached "+testInstance,
				with("snapshot_id", testSnapshot), with("block_size", 2048))), lost.to(viewName)},
			codes.Unavailable, csierr.EffectUnknown},
		{"CV-15 a snapshot of another project", restore(), []exchange{
			ok(viewSnap, snapshotOf("ready", with("project_id", other))), not.to(postDisk),
			ok(viewProject, projectOf())}, codes.InvalidArgument, csierr.SourceIncompatible},
		{"a refusal for another reason", restore(), []exchange{ready, not.to(postDisk),
			ok(viewProject, projectOf())}, codes.Internal, csierr.RackError},
		{"CV-16 a snapshot in the making", restore(), []exchange{ok(viewSnap,
			snapshotOf("creating"))},
			codes.FailedPrecondition, csierr.SnapshotNotReady},
		{"CV-16 a faulted snapshot", restore(), []exchange{ok(viewSnap, snapshotOf("faulted"))},
			codes.FailedPrecondition, csierr.SnapshotFaulted},
		{"CV-16 a destroyed snapshot", restore(), []exchange{ok(viewSnap, snapshotOf("destroyed")),
			lost.to(viewName)}, codes.NotFound, csierr.SnapshotNotFound},
		{"CV-17 a limit below the snapshot", restore(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = csitest.Range(0, 9*volume.GiB)
		}), []exchange{ready}, codes.OutOfRange, csierr.CapacityOutOfRange},
		{"a snapshot without a size", restore(), []exchange{ok(viewSnap, snapshotOf("ready",
			with("size", 0)))}, codes.Internal, csierr.RackAnswerWrong},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.lines...).CreateVolume(t.Context(), test.req)
			if test.code != codes.OK {
				csitest.Want(t, err, test.code, test.reason)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			sameMessage(t, answer.GetVolume().GetContentSource(),
				fromSnapshot(testSnapshot)) // CV-23
		})
	}
}

func TestARestoredVolumeSaysWhatItsSnapshotHolds(t *testing.T) {
	snapshot := func(m volume.Tag) string {
		return snapshotOf("ready", with("description", m.Description()))
	}
	for _, test := range []struct{ name, snapshot, uuid string }{
		{"which filesystem, and how large it was", snapshot(volume.Tag{Name: "snap-1", Cluster: "blue",
			FilesystemUUID: testImage}), testImage},
		{"only how large it was, when the filesystem is not known", snapshotOf("ready"), ""},
		{"only that of a snapshot made by hand", snapshotOf("ready", with("description", "mine")), ""},
		{"only that of another cluster's", snapshot(volume.Tag{Name: "snap-1", Cluster: "red",
			FilesystemUUID: testImage}), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := createRequest()
			r.VolumeContentSource = fromSnapshot(testSnapshot)
			_, err := rackThat(t, ok(viewSnap, test.snapshot), exchange{want: postDisk, status: 201,
				body: diskOf("creating", with("snapshot_id", testSnapshot)),
				check: func(t *testing.T, body []byte) {
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

func TestDeadlinesReachTheRack(t *testing.T) {
	c := silentRack(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err := c.CreateVolume(ctx, createRequest())
	csitest.Want(t, err, codes.DeadlineExceeded, csierr.DeadlineExceeded)
}
