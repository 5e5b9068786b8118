package controller

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

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

var alone = listing()

func together(others ...string) exchange {
	return listing(append(others, diskOf(here))...)
}

func besideDisk(name string) string {
	return diskOf(here, with("id", racktest.Image), with("name", name))
}

var serialTwin = besideDisk(ownName + "-backup")

func TestPublishAttachesTheDiskOrReturnsTheReason(t *testing.T) { // OX-3
	published := &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{
		"diskName": ownName, "sizeBytes": "10737418240", "readOnly": "false",
		"diskId": racktest.Disk, "blockSize": "4096", "origin": "blank", "use": "filesystem",
		"filesystemUUID": racktest.Disk}}
	full := listing(hundred()[:12]...)
	gateway := racktest.Error(http.StatusInternalServerError, "Internal", "oops")
	otherProject := with("project_id", racktest.Disk)
	refused := script{noAttach, free, instance("running"), alone}
	local := script{racktest.Error(409, "Conflict", "cannot attach local storage disk: instance is "+
		"starting").To(attach), shown("detached", with("disk_type", "local")), instance("running"), alone}
	scriptedCalls{
		{"makes no request to attach an attached disk", script{together()}, ok},
		{"an unknown disk is reported before the node (CP-4)", script{noInstance, noDisk},
			fails(csierr.VolumeNotFound, racktest.Disk)},
		{"an unknown disk (CP-4)", script{alone, noDisk}, fails(csierr.VolumeNotFound, racktest.Disk)},
		{"an unknown instance (CP-5)", script{noInstance, free}, fails(csierr.InstanceNotFound,
			racktest.Instance)},
		{"a disk attached elsewhere stays there, and its node is named (CP-8)", script{alone, shown(
			elsewhere)}, fails(csierr.DiskAttachedElsewhere, racktest.OtherInstance)},
		{"a disk being attached elsewhere (CP-8)", script{alone, shown("attaching " +
			racktest.OtherInstance)}, fails(csierr.DiskAttachedElsewhere, racktest.OtherInstance)},
		{"a full instance (CP-9)", script{full, free, noAttach, free, instance("running"), full},
			fails(csierr.InstanceFull, "worker-1 ("+racktest.Instance+") has 12 disks")},
		{"an instance that was full before the attach (CP-9)", script{full, free, noAttach, free,
			instance("running"), alone}, fails(csierr.OperationPending, "changed meanwhile")},
		{"a disk being detached from another instance (CP-13)", script{alone, shown("detaching " +
			racktest.OtherInstance)}, fails(csierr.DiskBusy, "detaching")},
		{"an instance whose disks cannot be listed", script{later.To(beside)},
			fails(csierr.RackUnavailable)},
		{"an error of the rack at a full instance (CP-9)", script{full, free, gateway.To(attach), free},
			fails(csierr.RackUnavailable, "has 12 disks, the boot disk included")},
	}.try(t, publishRequest(), published)
	scriptedCalls{
		{"lists the instance before and after the attach", script{attachedNow, together()}, ok},
		{"a disk that cannot be read while it is attached (CP-15)", script{attachingNow,
			later.To(viewDisk)}, fails(csierr.RackUnavailable)},
		{"a disk that ends on another instance (CP-15)", script{attachingNow, shown(elsewhere)},
			fails(csierr.RackResponseInvalid, "not attached to the instance")},
		{"a disk being attached is awaited (CP-15)", script{attachingNow, shown(attaching), held,
			together()}, ok},
		{"a success that shows the disk detached", script{accepted(attach, diskOf("detached")), free},
			fails(csierr.RackResponseInvalid, "not attached")},
		{"a success that shows the disk at another instance", script{accepted(attach, diskOf(elsewhere)),
			shown(elsewhere)}, fails(csierr.EffectUnknown, racktest.OtherInstance)},
		{"a success that shows another disk", script{accepted(attach, diskOf(here, with("id",
			racktest.Image))), free}, fails(csierr.RackResponseInvalid, racktest.Image)},
		{"a success that shows a disk without a size", script{accepted(attach, diskOf(here, with("size",
			0))), free}, fails(csierr.RackResponseInvalid, "0 bytes")},
		{"an error inside the rack, which then does not respond (OX-8)", script{gateway.To(attach),
			forbidden.To(viewDisk)}, fails(csierr.EffectUnknown, "Forbidden")},
		{"a running instance without hot-plug (CP-10, E-28)", slices.Concat(refused, refused),
			fails(csierr.InstanceMustBeStopped, "the instance worker-1 ("+racktest.Instance+
				") is running and must be stopped", "no hot-plug")},
		{"an attach that the rack accepts at the second request (CP-10)", slices.Concat(refused,
			script{attachedNow, together()}), ok},
		{"an attach of which the second request is refused for another reason (CP-10)",
			slices.Concat(refused, script{noAttach, shown(elsewhere)}), fails(csierr.DiskAttachedElsewhere)},
		{"a local disk at a running instance, with hot-plug or without (CP-10)", slices.Concat(local,
			local), fails(csierr.InstanceMustBeStopped, "to attach a disk: a local disk is only attached")},
	}.after(alone, free).try(t, publishRequest(), published)
	scriptedCalls{
		{"a destroyed instance (CP-5)", script{free, instance("destroyed")},
			fails(csierr.InstanceNotFound)},
		{"a refusal of a disk that is attached there (CP-6)", script{held, together()}, ok},
		{"a disk attached elsewhere meanwhile, whose node is named (CP-8)", script{shown(elsewhere)},
			fails(csierr.DiskAttachedElsewhere, racktest.OtherInstance)},
		{"an instance in a state that takes no disks", script{free, instance("failed"), alone},
			fails(csierr.InstanceState, "the rack says no")},
		{"a refusal, after which the instance's disks cannot be listed", script{free,
			instance("running"), later.To(beside)}, fails(csierr.RackUnavailable)},
		{"an instance of another project (CP-11)", script{free, instance("running", otherProject)},
			fails(csierr.OtherProject, "different projects")},
		{"a disk being snapshotted (CP-13)", script{shown("maintenance")}, fails(csierr.DiskBusy,
			"maintenance")},
		{"a disk being created (CP-13)", script{shown("creating")}, fails(csierr.DiskBusy, "creating")},
		{"a disk being detached (CP-13)", script{shown(detaching)}, fails(csierr.DiskBusy, "detaching")},
		{"a disk that waits for its content (CP-13)", script{shown("import_ready")},
			fails(csierr.DiskImporting, "run 'oxide disk import finalize'")},
		{"a disk that is being written by an import (CP-13)", script{shown("importing_from_bulk_writes")},
			fails(csierr.DiskImporting, "run 'oxide disk import stop' and then")},
		{"a disk that is being finalized (CP-13)", script{shown("finalizing")}, fails(csierr.DiskBusy,
			"finalizing")},
		{"a faulted disk (CP-13)", script{shown("faulted")}, fails(csierr.DiskFaulted)},
		{"a destroyed disk (CP-13)", script{shown("destroyed")}, fails(csierr.VolumeNotFound)},
	}.after(alone, free, noAttach).try(t, publishRequest(), published)
}

func TestPublishContextContainsUseAndOriginFromTheTag(t *testing.T) {
	const another, plain = "csi-1234567890abcdef", "db"
	tagged := func(name string, tag volume.Tag) *oxide.Disk {
		return &oxide.Disk{Id: racktest.Disk, Name: oxide.Name(name), Size: 10 * volume.GiB,
			BlockSize: 4096, Description: tag.Description()}
	}
	made := volume.Tag{Name: "db", Cluster: "red", Origin: volume.OriginSnapshot,
		Use: volume.UseFilesystem, SourceBytes: volume.GiB, FilesystemUUID: racktest.Snapshot}
	for name, c := range map[string]struct {
		disk *oxide.Disk
		want map[string]string // the values in addition to the rack's
	}{
		"a disk of another cluster": {tagged(volume.DiskName("red", "db"), made),
			map[string]string{"use": "filesystem", "origin": "snapshot", "sourceBytes": "1073741824",
				"filesystemUUID": racktest.Snapshot}},
		"a disk with the tag of another": {tagged(another, made), map[string]string{"use": "both"}},
		"a disk with a tag that names no use": {tagged(volume.DiskName("red", "db"),
			volume.Tag{Name: "db", Cluster: "red"}), map[string]string{"use": "both"}},
		"a disk without a tag": {&oxide.Disk{Id: racktest.Disk, Name: plain, Size: 10 * volume.GiB,
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

func TestPublishRefusesASecondDiskWithTheSameSerial(t *testing.T) { // CP-12
	mine := attachedNow
	twinStays := coded(codes.Aborted, csierr.SerialTaken, "-backup", "stays attached")
	scriptedCalls{
		{"an attached disk with the serial prevents the attach", script{listing(serialTwin), free},
			fails(csierr.SerialTaken, "-backup")},
		{"a missing disk is reported before that (CP-4)", script{listing(serialTwin), noDisk},
			fails(csierr.VolumeNotFound, racktest.Disk)},
		{"a disk that was attached before is not detached", script{together(serialTwin)},
			fails(csierr.SerialTaken, "-backup")},
		{"a disk that was being attached before is not detached", script{listing(diskOf(attaching)),
			shown(attaching), mine, together(serialTwin)}, twinStays},
		{"a disk that somebody else attached meanwhile is not detached", script{alone, free, noAttach,
			held, together(serialTwin)}, twinStays},
		{"a context that names another disk", script{alone, shown("detached", with("name",
			"csi-0000000000000000"))}, fails(csierr.FieldInvalid, "diskName")},
	}.try(t, publishRequest(), nil)
	scriptedCalls{
		{"the disk stays until it is unpublished beside one that was attached meanwhile",
			script{together(serialTwin)}, coded(codes.Aborted, csierr.SerialTaken,
				ownName+" ("+racktest.Disk+") and "+ownName+"-backup (")},
		{"a failing second list makes the call UNAVAILABLE", script{forbidden.To(beside)},
			fails(csierr.EffectUnknown, "Forbidden")},
		{"a second list without the disk is retryable", script{alone}, fails(csierr.DiskBusy,
			"is not among its disks")},
		{"a list's second page counts after an empty one", script{reply(beside,
			pageOf("x")), reply(beside, pageOf("y", diskOf(here), serialTwin))}, twinStays},
		{"a list's second page counts after a full one", script{reply(beside, pageOf("x",
			hundred()...)), reply(beside, pageOf("y", diskOf(here), serialTwin))}, twinStays},
	}.after(alone, free, mine).try(t, publishRequest(), nil)
}

func TestPublishRefusesAnAccessTypeThatTheTagForbids(t *testing.T) {
	const fs, block, both = volume.UseFilesystem, volume.UseBlock, volume.UseBoth
	redName := volume.DiskName("red", "pvc-1") // the disk's name under a former id of the cluster
	for _, test := range []struct {
		use, cluster, name string // of the disk
		raw, fits          bool
	}{
		{fs, "blue", ownName, true, false}, {fs, "blue", ownName, false, true},
		{block, "blue", ownName, false, false}, {block, "blue", ownName, true, true},
		{both, "blue", ownName, true, true}, {both, "blue", ownName, false, true},
		{"", "blue", ownName, true, true}, // the tag names no use
		{fs, "red", redName, true, false}, {fs, "red", redName, false, true},
		{block, "red", redName, false, false}, {block, "red", redName, true, true},
		{fs, "blue", "csi-0000000000000000", true, true}, // the tag is that of another disk
	} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			tag := racktest.OwnTag
			tag.Use, tag.Cluster = test.use, test.cluster
			disk := func(state string) string { return diskOf(state, tagged(tag), with("name", test.name)) }
			capability, ends := csitest.Filesystem("ext4"), fails(csierr.UseDiffers)
			if test.raw {
				capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
			}
			listed, detached := listing(disk(here)), reply(viewDisk, disk("detached"))
			toAttach := script{alone, detached}
			if test.fits {
				ends, toAttach = ok, append(toAttach, accepted(attach, disk(here)), listed)
			}
			for _, lines := range []script{{listed}, toAttach} {
				r := publishRequest()
				r.VolumeCapability, r.VolumeContext = capability, nil // a static volume has no context
				ends(t, scripted(t, r, lines...))
			}
			answer, err := rackThat(t, detached).ValidateVolumeCapabilities(t.Context(),
				&csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk,
					VolumeCapabilities: []*csi.VolumeCapability{capability}})
			if err != nil || test.fits != (answer.GetConfirmed() != nil) ||
				!test.fits && !strings.Contains(answer.GetMessage(), "created for") {
				t.Errorf("VC-4: got %v, %v", answer, err)
			}
		})
	}
}

func TestPublishAttachesAStaticVolume(t *testing.T) { // D-2
	const name = "made-by-hand-with-a-long-name"
	r := publishRequest()
	r.VolumeContext = nil
	static := func(state string) string {
		return diskOf(state, with("name", name), with("read_only", true))
	}
	scriptedCalls{
		{"lists the neighbours first", script{reply(beside, pageOf("x", besideDisk("boot"))),
			reply(viewDisk, static("detached")), accepted(attach, static(here)), listing(static(here))}, ok},
		{"needs no attach when it is attached", script{listing(static(here))}, ok},
		{"is refused beside a disk with the same 20 bytes (CP-12)",
			script{listing(besideDisk("made-by-hand-with-a-short-one")), reply(viewDisk,
				static("detached"))}, fails(csierr.SerialTaken, "made-by-hand-with-a-short-one")},
	}.try(t, r, &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{
		"diskName": name, "sizeBytes": "10737418240", "readOnly": "true", "diskId": racktest.Disk,
		"blockSize": "4096", "use": "both"}})
}

func TestPublishRefusesAttributesOfAnotherVolume(t *testing.T) { // D-24
	another := "csi-0000000000000000"
	for _, test := range []struct {
		name    string
		context map[string]string
		lines   script
		ends    func(*testing.T, error)
	}{
		{"a wrong diskName without a diskId", map[string]string{"diskName": another}, script{alone,
			free}, fails(csierr.FieldInvalid, "diskName")},
		{"the right diskName without a diskId", map[string]string{"diskName": ownName}, script{alone,
			free, attachedNow, together()}, ok},
		{"attributes copied from another volume", map[string]string{"diskName": another,
			"diskId": racktest.Image, "blockSize": "4096"}, script{alone, free}, fails(csierr.FieldInvalid,
			"diskName")},
		{"another volume's id beside the right name", map[string]string{"diskId": racktest.Image,
			"diskName": ownName}, script{alone, free}, fails(csierr.FieldInvalid, "diskId")},
		{"a disk that is attached, which stays", map[string]string{"diskName": another},
			script{together()}, fails(csierr.FieldInvalid, "diskName")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := publishRequest()
			r.VolumeContext = test.context
			test.ends(t, scripted(t, r, test.lines...))
		})
	}
}

func TestValidateVolumeCapabilitiesReportsWhatDoesNotFitTheDisk(t *testing.T) { // VC-2
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
		disk                exchange
		capabilities        []*csi.VolumeCapability
		context, parameters pairs
		want                string // text in the message; empty means confirmed
	}{
		{"everything right (VC-3)", made, fits, pairs{"diskName": ownName,
			"blockSize": "512", "diskId": racktest.Disk, "mkfsOptions": "reservedPercent=0",
			"storage.kubernetes.io/csiProvisionerIdentity": "x"}, pairs{"blockSize": "512",
			"diskType": "distributed", "mkfsOptions": "reservedPercent=0",
			"csi.storage.k8s.io/fstype": "ext4"}, ""},
		{"a static volume without a context (D-2)", shown("detached", with("description", "mine")), fits,
			nil, nil, ""},
		{"a mode (VC-4)", made, moded, nil, nil, "MULTI_NODE_MULTI_WRITER"},
		{"a mount flag that nodes refuse (VC-4)", made, flagged, nil, nil, "mount flag 1"},
		{"another disk's name (VC-5)", made, fits, pairs{"diskName": "x"}, nil, "diskName"},
		{"another snapshot (VC-5)", made, fits, pairs{"snapshotId": racktest.Image}, nil, "snapshotId"},
		{"another disk's id (VC-5)", made, fits, pairs{"diskId": racktest.Image}, nil, "diskId"},
		{"other blocks in the context (VC-5)", made, fits, pairs{"blockSize": "4096"}, nil, "blockSize"},
		{"other mkfsOptions in the context (VC-5)", made, fits, pairs{"mkfsOptions": "reservedPercent=1"},
			nil, "mkfsOptions"},
		{"an unknown key (VC-5)", made, fits, pairs{"colour": "blue"}, nil, "colour"},
		{"an unknown parameter (VC-5)", made, fits, nil, pairs{"colour": "blue"}, "colour"},
		{"other blocks (VC-5)", made, fits, nil, pairs{"blockSize": "4096"}, "blockSize"},
		{"another type (VC-5)", made, fits, nil, pairs{"diskType": "local"}, "diskType"},
		{"an image (VC-5)", made, fits, nil, pairs{"imageId": racktest.Image}, "imageId"},
		{"read-only (E-6)", shown("detached", with("read_only", true)), fits, nil, nil, "read-only"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer := csitest.Got(rackThat(t, test.disk).ValidateVolumeCapabilities(t.Context(),
				&csi.ValidateVolumeCapabilitiesRequest{VolumeId: racktest.Disk, Parameters: test.parameters,
					VolumeCapabilities: test.capabilities, VolumeContext: test.context}))(t)
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
	fails(csierr.VolumeNotFound)(t, scripted(t, request, noDisk))
	request.MutableParameters = map[string]string{"a": "b"}
	answer, err := rackThat(t, free).ValidateVolumeCapabilities(t.Context(), request)
	if must(t, err); !strings.Contains(answer.GetMessage(), "mutable_parameters") { // VC-5
		t.Errorf("got %v", answer)
	}
}

// hundred returns a full page of disks, after which another page may follow.
func hundred() []string {
	var disks []string
	for n := range 100 {
		disks = append(disks, diskOf(here, with("id", numbered(n)), with("name", numbered(n))))
	}
	return disks
}

func TestUnpublishDetachesTheDiskOrReturnsTheReason(t *testing.T) { // OX-3
	refused := script{noDetach, held, instance("running")}
	scriptedCalls{
		{"makes no request to detach a detached disk", script{free}, ok},
		{"a disk attached elsewhere stays there (CU-3, CU-5)", script{shown(elsewhere)}, ok},
		{"a disk in maintenance is on no node (CU-3)", script{shown("maintenance")}, ok},
		{"a deleted disk (CU-4)", gone, ok},
		{"a disk that cannot be seen (CU-4)", script{noDisk, noProject}, unseen},
		{"a faulted disk that the instance does not list (CU-10)", script{shown("faulted"), alone}, ok},
		{"a faulted disk that the instance still lists (CU-10)", script{shown("faulted"),
			listing(diskOf("faulted"))}, fails(csierr.DiskFaulted, "still among those")},
		{"a faulted disk whose instance does not respond (CU-10)", script{shown("faulted"),
			later.To(beside)}, fails(csierr.RackUnavailable)},
		{"a faulted disk whose instance is gone (CU-10)", script{shown("faulted"), noInstance, ownProject,
			ownUser, noInstance}, ok},
		{"a faulted disk whose instance cannot be seen (CU-10)", script{shown("faulted"), noInstance,
			noProject}, unseen},
		{"an attached disk without an instance", script{shown("attached")},
			fails(csierr.RackResponseInvalid, "no instance")},
	}.try(t, unpublishStep, nil)
	scriptedCalls{
		{"looks at the disk and detaches it", script{detachedNow}, ok},
		{"a disk deleted meanwhile (CU-4)", script{missing(detach), noDisk, ownProject,
			ownUser, noDisk}, ok},
		{"a disk that is faulted by its detach (CU-10)", script{accepted(detach, diskOf("faulted")),
			reply(beside, pageOf("x", diskOf("faulted", with("id", racktest.Image))))}, ok},
		{"a disk that is faulted by its detach and that the instance still lists (CU-10)",
			script{accepted(detach, diskOf("faulted")), listing(diskOf("faulted"))},
			fails(csierr.DiskFaulted, "still among those")},
		{"an instance that the rack calls destroyed and that has the disk (CU-6)", script{missing(detach),
			held, instance("destroyed")}, fails(csierr.InstanceNotFound, "not known to be detached")},
		{"a deleted instance that still has the disk (CU-6)", script{missing(detach), held,
			missing(viewInstance)}, fails(csierr.InstanceNotFound, "not known to be detached")},
		{"the boot disk (CU-8)", script{racktest.Error(409, "Conflict",
			"boot disk cannot be detached").To(detach), held, instance("stopped", with("boot_disk_id",
			racktest.Disk))}, fails(csierr.BootDisk, "worker-1")},
		{"a success that shows the disk attached", script{accepted(detach, diskOf(here))},
			fails(csierr.RackResponseInvalid, "still attached")},
		{"a success that shows a disk without a size", script{accepted(detach, diskOf("detached", with(
			"size", 0)))}, fails(csierr.RackResponseInvalid, "0 bytes")},
		{"a running instance without hot-plug (CU-7)", slices.Concat(refused, refused),
			fails(csierr.InstanceMustBeStopped, "must be stopped", "whether or not it attaches them")},
		{"a detach that the rack accepts at the second request (CU-7)", append(refused, detachedNow), ok},
	}.after(held).try(t, unpublishStep, nil)
	scriptedCalls{
		{"a disk attached elsewhere meanwhile stays there (CU-3)", script{shown(elsewhere)}, ok},
		{"a disk that is faulted meanwhile and that the instance still lists (CU-10)",
			script{shown("faulted"), listing(diskOf("faulted"))}, fails(csierr.DiskFaulted, "still among "+
				"those")},
		{"a disk that is already being detached (CU-10)", script{shown(detaching)}, fails(csierr.DiskBusy,
			"detaching")},
		{"a refusal, after which the disk cannot be read", script{later.To(viewDisk)},
			fails(csierr.RackUnavailable)},
		{"a refusal, after which the instance cannot be read", script{held, later.To(viewInstance)},
			fails(csierr.RackUnavailable)},
		{"a disk that is being attached (CU-9)", script{shown(attaching)}, fails(csierr.DiskBusy,
			"attaching")},
	}.after(held, noDetach).try(t, unpublishStep, nil)
	scriptedCalls{
		{"a disk that the rack attaches again during the detach (CU-10)", script{held},
			fails(csierr.RackResponseInvalid, "still attached")},
		{"a disk being detached is awaited (CU-10)", script{shown(detaching), free}, ok},
		{"a disk that cannot be read during the detach (CU-10)", script{later.To(viewDisk)},
			fails(csierr.RackUnavailable)},
		{"a disk that cannot be seen any more during the detach (OX-6)", script{noDisk, noProject},
			unseen},
		{"a disk that is deleted during the detach", gone, ok},
	}.after(held, detachingNow).try(t, unpublishStep, nil)
}

func TestUnpublishWithoutANodeDetachesTheDiskFromItsInstance(t *testing.T) { // CU-2
	scriptedCalls{
		{"a disk that is attached", script{held, detachedNow}, ok},
		{"a disk that is not attached", script{free}, ok},
		{"a disk that is attached elsewhere meanwhile", script{held, accepted(detach, diskOf(elsewhere))},
			fails(csierr.DiskBusy)},
		{"a detach that the token's user may not request", script{held, forbidden.To(detach)},
			fails(csierr.RoleMissing)},
		{"a disk that is deleted meanwhile", script{held, missing(detach), noDisk,
			ownProject, ownUser, noDisk}, ok},
		{"a disk that is being snapshotted is on no node", script{shown("maintenance")}, ok},
		{"a faulted disk, whose node is unknown", script{shown("faulted")}, fails(csierr.DiskFaulted)},
	}.try(t, unpublishAnywhereStep, nil)
}

func TestCallsReturnBeforeTheirDeadlineWhileADiskChangesState(t *testing.T) { // CP-15, CU-10
	for _, test := range []struct {
		request proto.Message
		lines   script
	}{
		{publishStep, script{alone, free, attachingNow}},
		{unpublishStep, script{held, detachingNow}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), answerMargin)
		defer cancel()
		fails(csierr.DeadlineExceeded)(t, csitest.Call(ctx, rackThat(t, test.lines...), test.request))
	}
}

func TestTheControllerStopsWaitingWhenTheContextIsCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	disk := &oxide.Disk{State: oxide.DiskState{Value: &oxide.DiskStateCreating{}}}
	_, err := awaitDisk(ctx, nil, disk, oxide.DiskStateStateCreating)
	fails(csierr.Canceled)(t, err)
	late := diskDeleted(racktest.Disk)
	open := &changes{open: map[change]time.Time{late: time.Now().Add(DefaultLateLimit)}}
	_, err = open.await(ctx, late)
	fails(csierr.EffectUnknown)(t, err)
}
