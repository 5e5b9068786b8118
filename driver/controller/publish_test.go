package controller

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	attach       = "POST /v1/instances/" + racktest.Instance + "/disks/attach"
	detach       = "POST /v1/instances/" + racktest.Instance + "/disks/detach"
	beside       = "GET /v1/instances/" + racktest.Instance + "/disks"
	viewInstance = "GET /v1/instances/" + racktest.Instance
	listDisks    = "GET /v1/disks"
)

const elsewhere = "attached " + racktest.OtherInstance

// alone lists an instance without disks. together lists one with the volume's disk and perhaps
// others.
var alone = listing()

func together(others ...string) racktest.Exchange {
	return listing(append(others, diskOf(here))...)
}

func besideDisk(name string) string {
	return diskOf(here, with("id", racktest.Image), with("name", name))
}

var serialTwin = besideDisk(volume.DiskName("blue", "pvc-1") + "-backup")

func TestPublishing(t *testing.T) { // OX-3
	published := &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{
		"diskName": volume.DiskName("blue", "pvc-1"), "sizeBytes": "10737418240", "readOnly": "false",
		"diskId": racktest.Disk, "blockSize": "4096", "origin": "blank", "use": "filesystem",
		"filesystemUUID": racktest.Disk}}
	full := listing(hundred()[:12]...)
	gateway := racktest.Error(http.StatusInternalServerError, "Internal", "oops")
	otherProject := with("project_id", racktest.Disk)
	refused := script{noAttach, free, instance("running"), alone}
	local := script{racktest.Error(409, "Conflict", "cannot attach local storage disk: instance is "+
		"starting").To(attach), shown("detached", with("disk_type", "local")), instance("running"), alone}
	scriptedCalls{
		{"makes no request to attach an attached disk", script{together()}, codes.OK, "", ""},
		{"CP-4 an unknown disk is reported before the node", script{noInstance, noDisk}, codes.NotFound,
			csierr.VolumeNotFound, racktest.Disk},
		{"CP-4 an unknown disk", script{alone, noDisk}, codes.NotFound, csierr.VolumeNotFound,
			racktest.Disk},
		{"CP-5 an unknown instance", script{noInstance, free}, codes.NotFound, csierr.InstanceNotFound,
			racktest.Instance},
		{"CP-8 attached elsewhere is left there, and names the node", script{alone, shown(elsewhere)},
			codes.FailedPrecondition, csierr.DiskAttachedElsewhere, racktest.OtherInstance},
		{"CP-8 being attached elsewhere", script{alone, shown("attaching " + racktest.OtherInstance)},
			codes.FailedPrecondition, csierr.DiskAttachedElsewhere, racktest.OtherInstance},
		{"CP-9 a full instance", script{full, free, noAttach, free, instance("running"), full},
			codes.ResourceExhausted, csierr.InstanceFull, "worker-1 (" + racktest.Instance +
				") has 12 disks"},
		{"CP-9 an instance that was full before", script{full, free, noAttach, free, instance("running"),
			alone}, codes.Aborted, csierr.OperationPending, "changed meanwhile"},
		{"CP-13 a disk being detached from another instance", script{alone, shown("detaching " +
			racktest.OtherInstance)}, codes.Aborted, csierr.DiskBusy, "detaching"},
		{"CP-9 an error inside the rack at a full instance", script{full, free, gateway.To(attach), free},
			codes.Unavailable, csierr.RackUnavailable, "has 12 disks, the boot disk included"},
	}.try(t, publishRequest(), published)
	scriptedCalls{
		{"lists the instance before and after the attach", script{attachedNow, together()}, codes.OK, "",
			""},
		{"CP-15 a disk that cannot be read while it is attached", script{attachingNow,
			later.To(racktest.ViewDisk)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CP-15 a disk that ends on another instance", script{attachingNow, shown(elsewhere)},
			codes.Unavailable, csierr.RackResponseInvalid, "not attached to the instance"},
		{"CP-15 a disk being attached is awaited", script{attachingNow, shown(attaching), held,
			together()}, codes.OK, "", ""},
		{"a success with a detached disk", script{accepted(attach, diskOf("detached")), free},
			codes.Unavailable, csierr.RackResponseInvalid, "not attached"},
		{"a success elsewhere", script{accepted(attach, diskOf(elsewhere)), shown(elsewhere)},
			codes.Unavailable, csierr.EffectUnknown, racktest.OtherInstance},
		{"OX-8 an error inside the rack, which then does not respond", script{gateway.To(attach),
			forbidden.To(racktest.ViewDisk)}, codes.Unavailable, csierr.EffectUnknown, "Forbidden"},
		{"CP-10 E-28 a running instance without hot-plug", slices.Concat(refused, refused),
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "the instance worker-1 (" +
				racktest.Instance + ") is running and must be stopped"},
		{"CP-10 an attach that the rack accepts at the second request", slices.Concat(refused,
			script{attachedNow, together()}), codes.OK, "", ""},
		{"CP-10 an attach of which the second request is refused for another reason",
			slices.Concat(refused, script{noAttach, shown(elsewhere)}), codes.FailedPrecondition,
			csierr.DiskAttachedElsewhere, ""},
		{"CP-10 a local disk at a running instance, with hot-plug or without", slices.Concat(local,
			local), codes.FailedPrecondition, csierr.InstanceMustBeStopped,
			"to attach a disk: a local disk is only attached"},
	}.after(alone, free).try(t, publishRequest(), published)
	scriptedCalls{
		{"CP-5 a destroyed instance", script{free, instance("destroyed")}, codes.NotFound,
			csierr.InstanceNotFound, ""},
		{"CP-6 a refusal of a disk that is attached there", script{held, together()}, codes.OK, "", ""},
		{"CP-8 attached elsewhere meanwhile names the node", script{shown(elsewhere)},
			codes.FailedPrecondition, csierr.DiskAttachedElsewhere, racktest.OtherInstance},
		{"an instance in a state that takes no disks", script{free, instance("failed"), alone},
			codes.FailedPrecondition, csierr.InstanceState, "the rack says no"},
		{"CP-11 an instance of another project", script{free, instance("running", otherProject)},
			codes.InvalidArgument, csierr.OtherProject, "different projects"},
		{"CP-13 a disk being snapshotted", script{shown("maintenance")}, codes.Aborted, csierr.DiskBusy,
			"maintenance"},
		{"CP-13 a disk being created", script{shown("creating")}, codes.Aborted, csierr.DiskBusy,
			"creating"},
		{"CP-13 a disk being detached", script{shown(detaching)}, codes.Aborted, csierr.DiskBusy,
			"detaching"},
		{"CP-13 a disk that waits for its content", script{shown("import_ready")},
			codes.FailedPrecondition, csierr.DiskImporting, "run 'oxide disk import finalize'"},
		{"CP-13 a disk that is being written by an import", script{shown("importing_from_bulk_writes")},
			codes.FailedPrecondition, csierr.DiskImporting, "run 'oxide disk import stop' and then"},
		{"CP-13 a disk that is being finalized", script{shown("finalizing")}, codes.Aborted,
			csierr.DiskBusy, "finalizing"},
		{"CP-13 a faulted disk", script{shown("faulted")}, codes.FailedPrecondition, csierr.DiskFaulted,
			""},
		{"CP-13 a destroyed disk", script{shown("destroyed")}, codes.NotFound, csierr.VolumeNotFound, ""},
	}.after(alone, free, noAttach).try(t, publishRequest(), published)
}

func TestPublishContextHasTheUseAndTheBirthOfEveryDisk(t *testing.T) {
	const another, plain = "csi-1234567890abcdef", "db"
	tagged := func(name string, tag volume.Tag) *oxide.Disk {
		return &oxide.Disk{Id: racktest.Disk, Name: oxide.Name(name), Size: 10 * volume.GiB,
			BlockSize: 4096, Description: tag.Description()}
	}
	made := volume.Tag{Name: "db", Cluster: "red", Origin: volume.OriginSnapshot,
		Use: volume.UseFilesystem, SourceBytes: volume.GiB, FilesystemUUID: racktest.Snapshot}
	for name, c := range map[string]struct {
		disk *oxide.Disk
		want map[string]string // beyond what the rack shows
	}{
		"another cluster's": {tagged(volume.DiskName("red", "db"), made),
			map[string]string{"use": "filesystem", "origin": "snapshot", "sourceBytes": "1073741824",
				"filesystemUUID": racktest.Snapshot}},
		"one with another disk's tag": {tagged(another, made), map[string]string{"use": "both"}},
		"one with a tag that tells no use": {tagged(volume.DiskName("red", "db"),
			volume.Tag{Name: "db", Cluster: "red"}), map[string]string{"use": "both"}},
		"one without a tag": {&oxide.Disk{Id: racktest.Disk, Name: plain, Size: 10 * volume.GiB,
			BlockSize: 4096, Description: "mine"}, map[string]string{"use": "both"}},
	} {
		t.Run(name, func(t *testing.T) {
			want := map[string]string{"diskName": string(c.disk.Name), "diskId": racktest.Disk,
				"blockSize": "4096", "sizeBytes": "10737418240", "readOnly": "false"}
			maps.Copy(want, c.want)
			if got := publishContext(c.disk); !maps.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestTwoDisksWithOneSerialAreNeverAttachedTogether(t *testing.T) { // CP-12
	mine := attachedNow
	scriptedCalls{
		{"an attached one prevents the attach", script{listing(serialTwin), free},
			codes.FailedPrecondition, csierr.SerialTaken, "-backup"},
		{"CP-4: a missing disk is reported before", script{listing(serialTwin), noDisk}, codes.NotFound,
			csierr.VolumeNotFound, racktest.Disk},
		{"a disk that was attached before is not detached", script{together(serialTwin)},
			codes.FailedPrecondition, csierr.SerialTaken, "-backup"},
		{"a disk that was being attached before is not detached", script{listing(diskOf(attaching)),
			shown(attaching), mine, together(serialTwin)}, codes.Aborted, csierr.SerialTaken,
			"stays attached"},
		{"a disk that somebody else attached meanwhile is not detached", script{alone, free, noAttach,
			held, together(serialTwin)}, codes.Aborted, csierr.SerialTaken, "stays attached"},
		{"a context that names another disk", script{alone, shown("detached", with("name",
			"csi-0000000000000000"))}, codes.InvalidArgument, csierr.FieldInvalid, "diskName"},
	}.try(t, publishRequest(), nil)
	scriptedCalls{
		{"beside one that was attached meanwhile the disk stays until it is unpublished",
			script{together(serialTwin)}, codes.Aborted, csierr.SerialTaken, volume.DiskName("blue",
				"pvc-1") + " (" + racktest.Disk + ") and " + volume.DiskName("blue", "pvc-1") + "-backup ("},
		{"a failing second list makes the call UNAVAILABLE", script{forbidden.To(beside)},
			codes.Unavailable, csierr.EffectUnknown, "Forbidden"},
		{"a second list without the disk is retryable", script{alone}, codes.Aborted, csierr.DiskBusy,
			"is not among its disks"},
		{"the second page of the list counts, behind an empty one", script{racktest.OK(beside,
			pageOf("x")), racktest.OK(beside, pageOf("y", diskOf(here), serialTwin))}, codes.Aborted,
			csierr.SerialTaken, "-backup"},
		{"the second page of the list counts, behind a full one", script{racktest.OK(beside, pageOf("x",
			hundred()...)), racktest.OK(beside, pageOf("y", diskOf(here), serialTwin))}, codes.Aborted,
			csierr.SerialTaken, "-backup"},
	}.after(alone, free, mine).try(t, publishRequest(), nil)
}

func TestAVolumeIsPublishedOnlyForItsUse(t *testing.T) {
	madeFor := func(use, cluster, name string) func(state string) string {
		m := racktest.OwnTag
		m.Use, m.Cluster = use, cluster
		return func(state string) string {
			return diskOf(state, tagged(m), with("name", name))
		}
	}
	own := func(use string) func(string) string {
		return madeFor(use, "blue", volume.DiskName("blue", "pvc-1"))
	}
	// The same disk after the cluster's id was changed.
	foreign := func(use string) func(string) string {
		return madeFor(use, "red", volume.DiskName("red", "pvc-1"))
	}
	mounted := csitest.Filesystem("ext4")
	raw := &csi.VolumeCapability{AccessMode: csitest.Filesystem("").GetAccessMode(),
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	for _, test := range []struct {
		name       string
		disk       func(state string) string
		capability *csi.VolumeCapability
		fits       bool
	}{
		{"a filesystem's as a device", own(volume.UseFilesystem), raw, false},
		{"a filesystem's as a filesystem", own(volume.UseFilesystem), mounted, true},
		{"a device as a filesystem", own(volume.UseBlock), mounted, false},
		{"a device as a device", own(volume.UseBlock), raw, true},
		{"one for both as a device", own(volume.UseBoth), raw, true},
		{"one for both as a filesystem", own(volume.UseBoth), mounted, true},
		{"one whose tag has no use", own(""), raw, true},
		{"another cluster's filesystem as a device", foreign(volume.UseFilesystem), raw, false},
		{"another cluster's filesystem as a filesystem", foreign(volume.UseFilesystem), mounted, true},
		{"another cluster's device as a filesystem", foreign(volume.UseBlock), mounted, false},
		{"another cluster's device as a device", foreign(volume.UseBlock), raw, true},
		{"one whose tag is another disk's", madeFor(volume.UseFilesystem, "blue",
			"csi-0000000000000000"), raw, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			listed := listing(test.disk(here))
			for name, lines := range map[string]script{
				"attached":       {listed},
				"to be attached": {alone, racktest.OK(racktest.ViewDisk, test.disk("detached"))},
			} {
				if name == "to be attached" && test.fits {
					lines = append(lines, accepted(attach, test.disk(here)), listed)
				}
				r := publishRequest()
				r.VolumeCapability = test.capability
				r.VolumeContext = nil // as of a static volume
				_, err := rackThat(t, lines...).ControllerPublishVolume(t.Context(), r)
				if test.fits != (err == nil) {
					t.Errorf("%s: got %v", name, err)
				}
				if !test.fits {
					csitest.Want(t, err, codes.FailedPrecondition, csierr.UseDiffers)
				}
			}
			answer, err := rackThat(t, racktest.OK(racktest.ViewDisk, test.disk("detached"))).
				ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
					VolumeId: racktest.Disk, VolumeCapabilities: []*csi.VolumeCapability{test.capability}})
			if err != nil || test.fits != (answer.GetConfirmed() != nil) ||
				!test.fits && !strings.Contains(answer.GetMessage(), "created for") {
				t.Errorf("VC-4: got %v, %v", answer, err)
			}
		})
	}
}

func TestPublishingAStaticVolume(t *testing.T) { // D-2
	const name = "made-by-hand-with-a-long-name"
	r := publishRequest()
	r.VolumeContext = nil
	static := func(state string) string {
		return diskOf(state, with("name", name), with("read_only", true))
	}
	scriptedCalls{
		{"lists the neighbours first", script{racktest.OK(beside, pageOf("x", besideDisk("boot"))),
			racktest.OK(racktest.ViewDisk, static("detached")), accepted(attach, static(here)),
			listing(static(here))}, codes.OK, "", ""},
		{"needs no attach when it is attached", script{listing(static(here))}, codes.OK, "", ""},
		{"CP-12 is refused beside one of the same 20 bytes", script{listing(besideDisk(
			"made-by-hand-with-a-short-one")), racktest.OK(racktest.ViewDisk, static("detached"))},
			codes.FailedPrecondition, csierr.SerialTaken, "made-by-hand-with-a-short-one"},
	}.try(t, r, &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{
		"diskName": name, "sizeBytes": "10737418240", "readOnly": "true", "diskId": racktest.Disk,
		"blockSize": "4096", "use": "both"}})
}

func TestAStaticVolumeWithAttributesOfAnotherIsNotAttached(t *testing.T) { // D-24
	another := "csi-0000000000000000"
	for _, test := range []struct {
		name    string
		context map[string]string
		lines   script
		code    codes.Code
		words   string
	}{
		{"a diskName without an id is checked", map[string]string{"diskName": another}, script{alone,
			free}, codes.InvalidArgument, "diskName"},
		{"and attached if it is right", map[string]string{"diskName": volume.DiskName("blue", "pvc-1")},
			script{alone, free, attachedNow, together()}, codes.OK, ""},
		{"attributes copied from another volume", map[string]string{"diskName": another,
			"diskId": racktest.Image, "blockSize": "4096"}, script{alone, free}, codes.InvalidArgument,
			"diskName"},
		{"another volume's id beside the right name", map[string]string{"diskId": racktest.Image,
			"diskName": volume.DiskName("blue", "pvc-1")}, script{alone, free}, codes.InvalidArgument,
			"diskId"},
		{"a disk that is attached, which stays", map[string]string{"diskName": another},
			script{together()}, codes.InvalidArgument, "diskName"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := publishRequest()
			r.VolumeContext = test.context
			_, err := rackThat(t, test.lines...).ControllerPublishVolume(t.Context(), r)
			scriptedCall{code: test.code, reason: csierr.FieldInvalid, words: test.words}.verify(t, err)
		})
	}
}

func TestValidating(t *testing.T) { // VC-2
	type pairs = map[string]string
	fits := []*csi.VolumeCapability{csitest.Filesystem("ext4")}
	flagged := []*csi.VolumeCapability{csitest.Filesystem("ext4")}
	flagged[0].GetMount().MountFlags = []string{"noatime,bind"}
	moded := append(slices.Clip(fits),
		csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
	made := shown("detached", with("block_size", 512), tagged(volume.Tag{Name: "pvc-1",
		Cluster: "blue", MkfsOptions: "reservedPercent=0"}))
	for _, test := range []struct {
		name                string
		disk                racktest.Exchange
		capabilities        []*csi.VolumeCapability
		context, parameters pairs
		want                string // in the message; empty means confirmed
	}{
		{"VC-3 everything right", made, fits, pairs{"diskName": volume.DiskName("blue", "pvc-1"),
			"blockSize": "512", "diskId": racktest.Disk, "mkfsOptions": "reservedPercent=0",
			"storage.kubernetes.io/csiProvisionerIdentity": "x"}, pairs{"blockSize": "512",
			"diskType": "distributed", "mkfsOptions": "reservedPercent=0",
			"csi.storage.k8s.io/fstype": "ext4"}, ""},
		{"D-2 a static volume without a context", shown("detached", with("description", "mine")), fits,
			nil, nil, ""},
		{"VC-4 a mode", made, moded, nil, nil, "MULTI_NODE_MULTI_WRITER"},
		{"VC-4 a mount flag that nodes refuse", made, flagged, nil, nil, "mount flag 1"},
		{"VC-5 another disk's name", made, fits, pairs{"diskName": "x"}, nil, "diskName"},
		{"VC-5 another snapshot", made, fits, pairs{"snapshotId": racktest.Image}, nil, "snapshotId"},
		{"VC-5 another disk's id", made, fits, pairs{"diskId": racktest.Image}, nil, "diskId"},
		{"VC-5 other blocks in the context", made, fits, pairs{"blockSize": "4096"}, nil, "blockSize"},
		{"VC-5 other mkfsOptions in the context", made, fits, pairs{"mkfsOptions": "reservedPercent=1"},
			nil, "mkfsOptions"},
		{"VC-5 an unknown key", made, fits, pairs{"colour": "blue"}, nil, "colour"},
		{"VC-5 an unknown parameter", made, fits, nil, pairs{"colour": "blue"}, "colour"},
		{"VC-5 other blocks", made, fits, nil, pairs{"blockSize": "4096"}, "blockSize"},
		{"VC-5 another type", made, fits, nil, pairs{"diskType": "local"}, "diskType"},
		{"VC-5 an image", made, fits, nil, pairs{"imageId": racktest.Image}, "imageId"},
		{"E-6 a read-only disk", shown("detached", with("read_only", true)), fits, nil, nil, "read-only"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.disk).ValidateVolumeCapabilities(t.Context(),
				&csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk, Parameters: test.parameters,
					VolumeCapabilities: test.capabilities, VolumeContext: test.context})
			must(t, err)
			if test.want != "" {
				if answer.GetConfirmed() != nil || !strings.Contains(answer.GetMessage(), test.want) {
					t.Errorf("got %v", answer)
				}
				return
			}
			csitest.SameMessage(t, answer, &csi.ValidateVolumeCapabilitiesResponse{
				Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeContext: test.context,
					Parameters: test.parameters, VolumeCapabilities: test.capabilities}})
		})
	}
	request := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk,
		VolumeCapabilities: fits}
	_, err := rackThat(t, noDisk).ValidateVolumeCapabilities(t.Context(), request)
	csitest.Want(t, err, codes.NotFound, csierr.VolumeNotFound)
	request.MutableParameters = map[string]string{"a": "b"}
	answer, err := rackThat(t, free).ValidateVolumeCapabilities(t.Context(), request)
	if must(t, err); !strings.Contains(answer.GetMessage(), "mutable_parameters") { // VC-5
		t.Errorf("got %v", answer)
	}
}

// hundred returns 100 disks of the instance: a page of this length need not be the last one.
func hundred() []string {
	var disks []string
	for n := range 100 {
		disks = append(disks, diskOf(here,
			with("id", racktest.Numbered(n)), with("name", racktest.Numbered(n))))
	}
	return disks
}

func TestUnpublishing(t *testing.T) { // OX-3
	refused := script{noDetach, held, instance("running")}
	scriptedCalls{
		{"makes no request to detach a detached disk", script{free}, codes.OK, "", ""},
		{"CU-3 CU-5 attached elsewhere stays there", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", script{shown("maintenance")}, codes.OK, "", ""},
		{"CU-4 a deleted disk", gone, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"CU-10 a faulted disk is looked for among those of the instance", script{shown("faulted"),
			alone}, codes.OK, "", ""},
		{"CU-10 a faulted disk that the instance still lists", script{shown("faulted"),
			listing(diskOf("faulted"))}, codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a faulted disk whose instance does not respond", script{shown("faulted"),
			later.To(beside)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", script{shown("faulted"), noInstance, ownProject,
			ownUser, noInstance}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen", script{shown("faulted"), noInstance,
			noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"an attached disk without an instance", script{shown("attached")}, codes.Unavailable,
			csierr.RackResponseInvalid, "no instance"},
	}.try(t, unpublishStep, nil)
	scriptedCalls{
		{"looks at the disk and detaches it", script{detachedNow}, codes.OK, "", ""},
		{"CU-4 a disk that is deleted meanwhile", script{racktest.NotFound.To(detach), noDisk, ownProject,
			ownUser, noDisk}, codes.OK, "", ""},
		{"CU-10 a disk that is faulted by its detach", script{accepted(detach, diskOf("faulted")),
			racktest.OK(beside, pageOf("x", diskOf("faulted", with("id", racktest.Image))))}, codes.OK, "",
			""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk",
			script{racktest.NotFound.To(detach), held, instance("destroyed")}, codes.NotFound,
			csierr.InstanceNotFound, "not known to be detached"},
		{"CU-6 a deleted instance that still has the disk", script{racktest.NotFound.To(detach), held,
			racktest.NotFound.To(viewInstance)}, codes.NotFound, csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-8 the boot disk", script{racktest.Error(409, "Conflict",
			"boot disk cannot be detached").To(detach), held, instance("stopped", with("boot_disk_id",
			racktest.Disk))}, codes.FailedPrecondition, csierr.BootDisk, "worker-1"},
		{"a success with a detached disk", script{accepted(detach, diskOf(here))}, codes.Unavailable,
			csierr.RackResponseInvalid, "still attached"},
		{"CU-7 a running instance without hot-plug", slices.Concat(refused, refused),
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-7 a detach that the rack accepts at the second request", append(refused, detachedNow),
			codes.OK, "", ""},
	}.after(held).try(t, unpublishStep, nil)
	scriptedCalls{
		{"CU-3 attached elsewhere meanwhile stays there", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-10 a disk that is faulted meanwhile and that the instance still lists",
			script{shown("faulted"), listing(diskOf("faulted"))}, codes.FailedPrecondition,
			csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk still on its way off", script{shown(detaching)}, codes.Aborted, csierr.DiskBusy,
			"detaching"},
		{"a refusal, after which the disk cannot be read", script{later.To(racktest.ViewDisk)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-9 a disk on its way on", script{shown(attaching)}, codes.Aborted, csierr.DiskBusy,
			"attaching"},
	}.after(held, noDetach).try(t, unpublishStep, nil)
	scriptedCalls{
		{"CU-10 a disk that the rack attaches again on its way off", script{held}, codes.Unavailable,
			csierr.RackResponseInvalid, "still attached"},
		{"CU-10 a disk on its way off is awaited", script{shown(detaching), free}, codes.OK, "", ""},
		{"OX-6 a disk that cannot be seen any more on its way off", script{noDisk, noProject},
			codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", gone, codes.OK, "", ""},
	}.after(held, detachingNow).try(t, unpublishStep, nil)
}

func TestUnpublishingWithoutANode(t *testing.T) { // CU-2
	scriptedCalls{
		{"it is", script{held, detachedNow}, codes.OK, "", ""},
		{"it is not", script{free}, codes.OK, "", ""},
		{"it is, and is attached elsewhere meanwhile", script{held, accepted(detach, diskOf(elsewhere))},
			codes.Aborted, csierr.DiskBusy, ""},
		{"it was, and is gone", script{held, racktest.NotFound.To(detach), noDisk, ownProject, ownUser,
			noDisk}, codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", script{shown("maintenance")}, codes.OK, "", ""},
		{"it is unknown, because the disk is faulted", script{shown("faulted")}, codes.FailedPrecondition,
			csierr.DiskFaulted, ""},
	}.try(t, unpublishAnywhereStep, nil)
}

func TestACallEndsInTimeWhileTheRackStillMovesTheDisk(t *testing.T) { // CP-15, CU-10
	for _, test := range []struct {
		request proto.Message
		lines   script
	}{
		{publishStep, script{alone, free, attachingNow}},
		{unpublishStep, script{held, detachingNow}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), answerMargin)
		defer cancel()
		csitest.Want(t, csitest.Call(ctx, rackThat(t, test.lines...), test.request),
			codes.DeadlineExceeded, csierr.DeadlineExceeded)
	}
}
