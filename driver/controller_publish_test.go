package driver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

const (
	attach       = "POST /v1/instances/" + testInstance + "/disks/attach"
	detach       = "POST /v1/instances/" + testInstance + "/disks/detach"
	beside       = "GET /v1/instances/" + testInstance + "/disks"
	viewInstance = "GET /v1/instances/" + testInstance
	listDisks    = "GET /v1/disks"
)

var (
	here      = "attached " + testInstance
	elsewhere = "attached " + otherInstance
)

// scene is a call of the controller against a script.
type scene struct {
	name   string
	lines  []exchange
	code   codes.Code
	reason Reason
	words  string // that the message has to contain
}

func (s scene) verify(t *testing.T, err error) {
	t.Helper()
	if s.code == codes.OK {
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	wantFailure(t, err, s.code, s.reason)
	if !strings.Contains(err.Error(), s.words) {
		t.Errorf("%v does not mention %s", err, s.words)
	}
}

func TestPublishing(t *testing.T) {
	manyDisks := make([]string, 12)
	for i := range manyDisks {
		manyDisks[i] = diskOf(here)
	}
	for _, s := range []scene{
		{"is one request", []exchange{accepted(attach, diskOf(here))}, codes.OK, "", ""},
		{"CP-4 an unknown disk comes before the node", []exchange{lost.to(attach),
			lost.to(viewDisk)},
			codes.NotFound, ReasonVolumeNotFound, testDisk},
		{"CP-5 an unknown instance", []exchange{lost.to(attach), ok(viewDisk, diskOf("detached")),
			lost.to(viewInstance)}, codes.NotFound, ReasonInstanceNotFound, testInstance},
		{"CP-5 a destroyed instance", []exchange{not.to(attach), ok(viewDisk, diskOf("detached")),
			ok(viewInstance, instanceOf("destroyed"))}, codes.NotFound, ReasonInstanceNotFound, ""},
		{"CP-6 a refusal although it is attached there", []exchange{not.to(attach),
			ok(viewDisk, diskOf(here))}, codes.OK, "", ""},
		{"CP-8 attached elsewhere names the node", []exchange{not.to(attach),
			ok(viewDisk, diskOf(elsewhere))}, codes.FailedPrecondition, ReasonDiskAttachedElsewhere,
			otherInstance},
		{"CP-8 on its way elsewhere", []exchange{not.to(attach),
			ok(viewDisk, diskOf("attaching "+otherInstance))}, codes.FailedPrecondition,
			ReasonDiskAttachedElsewhere, otherInstance},
		{"CP-9 a full instance", []exchange{not.to(attach), ok(viewDisk, diskOf("detached")),
			ok(viewInstance, instanceOf("running")), ok(beside, pageOf("", manyDisks...))},
			codes.ResourceExhausted, ReasonInstanceFull, "worker-1 has 12 disks"},
		{"CP-10 a running instance without hot-plug", []exchange{not.to(attach),
			ok(viewDisk, diskOf("detached")), ok(viewInstance, instanceOf("running")),
			ok(beside, pageOf(""))}, codes.FailedPrecondition, ReasonInstanceMustBeStopped,
			"the instance worker-1 is running and must be stopped"},
		{"an instance in a state that takes no disks", []exchange{not.to(attach),
			ok(viewDisk, diskOf("detached")), ok(viewInstance, instanceOf("failed")),
			ok(beside, pageOf(""))}, codes.FailedPrecondition, ReasonInstanceState,
			"the rack says no"},
		{"CP-11 another project", []exchange{not.to(attach), ok(viewDisk, diskOf("detached",
			with("project_id", testDisk))), ok(viewInstance, instanceOf("running"))},
			codes.InvalidArgument, ReasonOtherProject, "different projects"},
		{"CP-13 a disk being snapshotted", []exchange{not.to(attach), ok(viewDisk,
			diskOf("maintenance"))},
			codes.Aborted, ReasonDiskBusy, "maintenance"},
		{"CP-13 a disk being made", []exchange{not.to(attach), ok(viewDisk, diskOf("creating"))},
			codes.Aborted, ReasonDiskBusy, "creating"},
		{"CP-13 a disk on its way off", []exchange{not.to(attach),
			ok(viewDisk, diskOf("detaching "+testInstance))}, codes.Aborted, ReasonDiskBusy,
			"detaching"},
		{"CP-13 a disk on its way off another instance", []exchange{not.to(attach),
			ok(viewDisk, diskOf("detaching "+otherInstance))}, codes.Aborted, ReasonDiskBusy,
			"detaching"},
		{"CP-13 a faulted disk", []exchange{not.to(attach), ok(viewDisk, diskOf("faulted"))},
			codes.FailedPrecondition, ReasonDiskFaulted, ""},
		{"CP-13 a destroyed disk", []exchange{not.to(attach), ok(viewDisk, diskOf("destroyed"))},
			codes.NotFound, ReasonVolumeNotFound, ""},
		{"CP-15 a disk on its way is awaited", []exchange{
			accepted(attach, diskOf("attaching "+testInstance)),
			ok(viewDisk, diskOf("attaching "+testInstance)), ok(viewDisk, diskOf(here))}, codes.OK,
			"", ""},
		{"a success that is none", []exchange{accepted(attach, diskOf("detached"))}, codes.Internal,
			ReasonRackAnswerWrong, "not attached"},
		{"a success elsewhere", []exchange{accepted(attach, diskOf(elsewhere))}, codes.Internal,
			ReasonRackAnswerWrong, otherInstance},
		{"another disk's success", []exchange{accepted(attach, diskOf(here, with("id",
			testImage)))},
			codes.Internal, ReasonRackAnswerWrong, testImage},
		{"a context that names another disk", []exchange{accepted(attach, diskOf(here,
			with("name", "csi-0000000000000000")))}, codes.InvalidArgument, ReasonFieldInvalid,
			"diskName"},
		{"a lost answer", []exchange{{want: attach, cut: true}}, codes.Unavailable,
			ReasonRackUnavailable, ""},
		{"an error inside the rack", []exchange{rackError(500, "Internal", "oops").to(attach)},
			codes.Internal, ReasonRackError, "oops"},
	} {
		t.Run(s.name, func(t *testing.T) {
			answer, err := rackThat(t, s.lines...).ControllerPublishVolume(t.Context(),
				publishRequest())
			s.verify(t, err)
			if err == nil {
				sameMessage(t, answer, &csi.ControllerPublishVolumeResponse{
					PublishContext: map[string]string{
						"diskName": diskName("pvc-1"), "sizeBytes": "10737418240",
						"readOnly": "false",
					}})
			}
		})
	}
}

func TestD2PublishingAStaticVolume(t *testing.T) {
	const name = "made-by-hand-with-a-long-name"
	static := func(state string) string {
		return diskOf(state, with("name", name), with("read_only", true))
	}
	neighbour := func(name string) string {
		return diskOf(here, with("id", testImage), with("name", name))
	}
	for _, s := range []scene{
		{"looks at the neighbours first", []exchange{ok(viewDisk, static("detached")),
			ok(beside, pageOf("x", neighbour("boot"))), ok(beside, pageOf("")),
			accepted(attach, static(here))}, codes.OK, "", ""},
		{"needs no attach when it is attached", []exchange{ok(viewDisk, static(here)),
			ok(beside, pageOf("", static(here)))}, codes.OK, "", ""},
		{"CP-12 is refused beside one of the same 20 bytes", []exchange{ok(viewDisk,
			static("detached")),
			ok(beside, pageOf("", neighbour("made-by-hand-with-a-short-one")))},
			codes.FailedPrecondition,
			ReasonSerialTaken, "made-by-hand-with-a-short-one"},
		{"CP-4 of an unknown disk", []exchange{lost.to(viewDisk)}, codes.NotFound,
			ReasonVolumeNotFound,
			""},
		{"CP-5 to an unknown instance", []exchange{ok(viewDisk, static("detached")),
			lost.to(beside)},
			codes.NotFound, ReasonInstanceNotFound, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := publishRequest()
			r.VolumeContext = nil
			answer, err := rackThat(t, s.lines...).ControllerPublishVolume(t.Context(), r)
			s.verify(t, err)
			if err == nil && (answer.GetPublishContext()["diskName"] != name ||
				answer.GetPublishContext()["readOnly"] != "true") {
				t.Errorf("got %v", answer)
			}
		})
	}
}

func TestAStaticVolumeWhoseAttributesAreAnothersIsNotAttached(t *testing.T) {
	another := "csi-0000000000000000"
	for _, test := range []struct {
		name    string
		context map[string]string
		lines   []exchange
		code    codes.Code
		words   string
	}{
		{"a diskName of our form alone is looked at", map[string]string{"diskName": another},
			[]exchange{ok(viewDisk, diskOf("detached"))}, codes.InvalidArgument, "diskName"},
		{"and attached when it is right", map[string]string{"diskName": diskName("pvc-1")},
			[]exchange{ok(viewDisk, diskOf("detached")), ok(beside, pageOf("")),
				accepted(attach, diskOf(here))}, codes.OK, ""},
		{"attributes copied from another volume", map[string]string{"diskName": another,
			"diskId": testImage, "blockSize": "4096"}, []exchange{ok(viewDisk,
			diskOf("detached"))}, codes.InvalidArgument, "diskName"},
		{"another volume's id beside the right name", map[string]string{"diskId": testImage,
			"diskName": diskName("pvc-1")}, []exchange{ok(viewDisk, diskOf("detached"))},
			codes.InvalidArgument, "diskId"},
		{"a disk that is attached, which stays", map[string]string{"diskName": another},
			[]exchange{ok(viewDisk, diskOf(here))}, codes.InvalidArgument, "diskName"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := publishRequest()
			r.VolumeContext = test.context
			_, err := rackThat(t, test.lines...).ControllerPublishVolume(t.Context(), r)
			scene{code: test.code, reason: ReasonFieldInvalid, words: test.words}.verify(t, err)
		})
	}
}

func TestValidating(t *testing.T) {
	made := diskOf("detached", with("block_size", 512), with("description", mark{Name: "pvc-1",
		Cluster: "blue", MkfsOptions: "reservedPercent=0"}.description()))
	for _, test := range []struct {
		name string
		disk string
		edit func(*csi.ValidateVolumeCapabilitiesRequest)
		want string // in the message; empty means confirmed
	}{
		{"VC-3 everything right", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"diskName": diskName("pvc-1"), "blockSize": "512",
				"diskId":      testDisk,
				"mkfsOptions": "reservedPercent=0",
				"storage.kubernetes.io/csiProvisionerIdentity": "x"}
			r.Parameters = map[string]string{"blockSize": "512", "diskType": "distributed",
				"mkfsOptions": "reservedPercent=0", "csi.storage.k8s.io/fstype": "ext4"}
		}, ""},
		{"D-2 a static volume without a context", diskOf("detached", with("description", "mine")),
			func(*csi.ValidateVolumeCapabilitiesRequest) {}, ""},
		{"VC-4 a mode", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities,
				inMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
		}, "MULTI_NODE_MULTI_WRITER"},
		{"VC-5 another disk's name", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"diskName": "x"}
		}, "diskName"},
		{"VC-5 another disk's id", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"diskId": testImage}
		}, "diskId"},
		{"VC-5 other blocks in the context", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"blockSize": "4096"}
		}, "blockSize"},
		{"VC-5 other mkfsOptions in the " +
			"context", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"mkfsOptions": "reservedPercent=1"}
		}, "mkfsOptions"},
		{"VC-5 an unknown key", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{"colour": "blue"}
		}, "colour"},
		{"VC-5 an unknown parameter", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{"colour": "blue"}
		}, "colour"},
		{"VC-5 other blocks", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{"blockSize": "4096"}
		}, "blockSize"},
		{"VC-5 another type", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{"diskType": "local"}
		}, "diskType"},
		{"VC-5 an image", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{"imageId": testImage}
		}, "imageId"},
		{"VC-5 mutable parameters", made, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.MutableParameters = map[string]string{"a": "b"}
		}, "mutable_parameters"},
		{"E-6 a read-only disk", diskOf("detached", with("read_only", true)),
			func(*csi.ValidateVolumeCapabilitiesRequest) {}, "read-only"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: testDisk,
				VolumeCapabilities: []*csi.VolumeCapability{mountable("ext4")}}
			test.edit(r)
			answer, err := rackThat(t, ok(viewDisk,
				test.disk)).ValidateVolumeCapabilities(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if test.want != "" {
				if answer.GetConfirmed() != nil || !strings.Contains(answer.GetMessage(),
					test.want) {
					t.Errorf("got %v", answer)
				}
				return
			}
			sameMessage(t, answer, &csi.ValidateVolumeCapabilitiesResponse{
				Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
					VolumeContext: r.GetVolumeContext(), Parameters: r.GetParameters(),
					VolumeCapabilities: r.GetVolumeCapabilities(),
				}})
		})
	}
	_, err := rackThat(t, lost.to(viewDisk)).ValidateVolumeCapabilities(t.Context(),
		&csi.ValidateVolumeCapabilitiesRequest{VolumeId: testDisk,
			VolumeCapabilities: []*csi.VolumeCapability{mountable("ext4")}})
	wantFailure(t, err, codes.NotFound, ReasonVolumeNotFound)
}
