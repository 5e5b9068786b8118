package controller

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func listed(n int, state string, edits ...edit) string {
	name := fmt.Sprint("pvc-", n)
	return diskOf(state, append([]edit{
		with("id", numbered(n)),
		with("name", volume.DiskName("blue", name)),
		tagged(volume.Tag{Name: name, Cluster: "blue"}),
	}, edits...)...)
}

func volumeIDs(answer *csi.ListVolumesResponse) []string {
	var ids []string
	for _, e := range answer.GetEntries() {
		ids = append(ids, e.GetVolume().GetVolumeId())
	}
	return ids
}

func TestListVolumesListsOwnAndAttachedDisks(t *testing.T) { // D-69, LV-5
	mine := with("description", "made by hand")
	red := tagged(volume.Tag{Name: "x", Cluster: "red"})
	copied := with("name", "by-hand")
	c := rackThat(t,
		reply(listDisks, pageOf("p2", listed(1, "detached"), listed(2, here), listed(3, "detached",
			red), listed(4, "detached", copied), listed(5, "detached", mine))),
		// The driver asks the rack for the boot disks only if a foreign disk is attached.
		reply(listDisks, pageOf("p3", listed(6, here, mine), listed(7, here, red), listed(8,
			"faulted"), listed(9, "detaching "+racktest.OtherInstance), listed(10, here, red), listed(11,
			here, copied))),
		reply("GET /v1/instances", pageOf("i2", racktest.InstanceOf("running", with("boot_disk_id",
			numbered(7))))),
		reply("GET /v1/instances", pageOf("")),
		reply(listDisks, pageOf("")),
	)
	answer := csitest.Got(c.ListVolumes(t.Context(), &csi.ListVolumesRequest{}))(t)
	want := []string{numbered(1), numbered(2), numbered(6),
		numbered(8), numbered(9), numbered(10), numbered(11)}
	if diff := cmp.Diff(want, volumeIDs(answer)); diff != "" {
		t.Error(diff)
	}
	nodes := map[string][]string{}
	for _, e := range answer.GetEntries() {
		if e.GetStatus() == nil {
			t.Errorf("LV-5: %v has no status", e)
		}
		nodes[e.GetVolume().GetVolumeId()] = e.GetStatus().GetPublishedNodeIds()
	}
	wantNodes := map[string][]string{numbered(1): nil, numbered(2): {racktest.Instance},
		numbered(6): {racktest.Instance}, numbered(8): nil, numbered(9): {racktest.OtherInstance},
		numbered(10): {racktest.Instance}, numbered(11): {racktest.Instance}}
	if diff := cmp.Diff(wantNodes, nodes); diff != "" || answer.GetNextToken() != "" {
		t.Errorf("LV-5: %s, next %q", diff, answer.GetNextToken())
	}
}

func TestAllCallsDescribeAVolumeAlike(t *testing.T) { // B-6, GV-3
	restored := func(state string) string {
		return diskOf(state, with("snapshot_id", racktest.Snapshot), tagged(volume.Tag{Name: "pvc-1",
			Cluster: "blue", MkfsOptions: "reservedPercent=0"}))
	}
	c := rackThat(t, snap("ready"), created(postDisk, restored("creating")), reply(listDisks,
		pageOf("", restored("detached"))), reply(viewDisk, restored(here)))
	c.Topology = rackA
	r := restoring(parameter("mkfsOptions", "reservedPercent=0"))
	made := csitest.Got(c.CreateVolume(t.Context(), r))(t)
	list, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || len(list.GetEntries()) != 1 {
		t.Fatalf("got %v, %v", list, err)
	}
	csitest.SameMessage(t, list.GetEntries()[0].GetVolume(), made.GetVolume())
	csitest.SameMessage(t, csitest.Got(c.ControllerGetVolume(t.Context(), getStep))(t),
		&csi.ControllerGetVolumeResponse{Volume: made.GetVolume(), // GV-3
			Status: &csi.ControllerGetVolumeResponse_VolumeStatus{
				PublishedNodeIds: []string{racktest.Instance}}})
}

func TestReadsOfAnUnknownVolumeReturnNotFound(t *testing.T) { // GV-2, VH-4
	for _, request := range []proto.Message{getStep, healthStep} {
		fails(csierr.VolumeNotFound)(t, scripted(t, request, noDisk))
	}
}

func TestPagesContainEveryVolumeOnce(t *testing.T) { // LV-3, LV-4
	rack := &longRack{project: racktest.Project}
	var want []string
	for n := range 57 {
		edit := with("description", "made by hand")
		if n%3 > 0 { // ListVolumes omits the other disks
			edit = with("block_size", 512)
			want = append(want, numbered(n))
		}
		rack.items = append(rack.items, listed(n, "detached", edit))
	}
	for _, rack.most = range []int{1, 7, 57, 100} {
		for _, most := range []int32{0, 1, 2, 5, 19, 37, 38, 39, 60} {
			walkList(t, rack, pagedLists["volumes"].call, most, want)
		}
	}
}

func TestInvalidPageRequestsAreRefused(t *testing.T) { // LV-1, LV-2, LS-1, LS-2, VH-2
	c := rackThat(t)
	for _, request := range []proto.Message{&csi.ListVolumesRequest{MaxEntries: -1},
		&csi.ListSnapshotsRequest{MaxEntries: -1},
		&csi.ControllerListVolumeHealthRequest{MaxEntries: -1}} {
		fails(csierr.FieldInvalid)(t, csitest.Call(t.Context(), c, request))
	}
	for _, token := range []string{"invalid-token", strings.ToUpper(racktest.Disk), "7",
		strings.Repeat("x", 500)} {
		for _, request := range []proto.Message{&csi.ListVolumesRequest{StartingToken: token},
			&csi.ListSnapshotsRequest{StartingToken: token},
			&csi.ControllerListVolumeHealthRequest{StartingToken: token}} {
			fails(csierr.StartingTokenInvalid)(t, csitest.Call(t.Context(), c, request))
		}
	}
}

func TestListVolumesFailsIfTheRackIsUnavailable(t *testing.T) {
	scriptedCalls{
		{"the second page fails", script{reply(listDisks, pageOf("p", listed(1, "detached"))),
			later.To(listDisks)}, fails(csierr.RackUnavailable)},
		{"the boot disks are unknown", script{reply(listDisks, pageOf("p", listed(1, here,
			with("description", "")))), later.To("GET /v1/instances")}, fails(csierr.RackUnavailable)},
	}.try(t, &csi.ListVolumesRequest{}, nil)
}

func TestOnlyFaultedVolumesAreUnhealthy(t *testing.T) { // VH-6, VH-5
	c := rackThat(t, reply(listDisks, pageOf("", listed(1, "detached"), listed(2, "faulted"),
		listed(3, "maintenance"), listed(4, "creating"), listed(5, here), listed(6, "import_ready"),
		listed(7, "faulted"))))
	answer := csitest.Got(c.ControllerListVolumeHealth(t.Context(),
		&csi.ControllerListVolumeHealthRequest{MaxEntries: 1}))(t)
	ill := &csi.VolumeHealth{VolumeId: numbered(2),
		HealthStatuses: []*csi.VolumeHealth_VolumeHealthEntry{{
			Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "DiskFaulted",
			Message: "the rack reports the disk " + volume.DiskName("blue", "pvc-2") + " as faulted"}}}
	csitest.SameMessage(t, answer, &csi.ControllerListVolumeHealthResponse{
		Entries: []*csi.VolumeHealth{ill}, NextToken: numbered(2)})
	ill.VolumeId = racktest.Disk
	ill.HealthStatuses[0].Message = "the rack reports the disk " + ownName + " as faulted"
	for _, c := range []struct {
		disk exchange
		want *csi.VolumeHealth
	}{{shown("faulted"), ill}, {free, &csi.VolumeHealth{VolumeId: racktest.Disk}}} {
		alone := csitest.Got(rackThat(t, c.disk).ControllerGetVolumeHealth(t.Context(), healthStep))(t)
		csitest.SameMessage(t, alone.GetVolumeHealth(), c.want)
	}
}

func TestGetCapacityReturnsTheUnusedQuota(t *testing.T) { // CG-4, CG-5
	const utilization = "GET /v1/utilization"
	left := func(capacity, used uint64) exchange {
		return reply(utilization, fmt.Sprintf(`{"capacity":{"cpus":1,"memory":1,"storage":%d},`+
			`"provisioned":{"cpus":1,"memory":1,"storage":%d}}`, capacity, used))
	}
	limits := func(available int64) *csi.GetCapacityResponse {
		return &csi.GetCapacityResponse{AvailableCapacity: available,
			MaximumVolumeSize: wrapperspb.Int64(1023 * volume.GiB),
			MinimumVolumeSize: wrapperspb.Int64(volume.GiB)}
	}
	manyReaders := []*csi.VolumeCapability{
		csitest.InMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)}
	local := limits(5 * volume.GiB)
	local.MaximumVolumeSize = nil
	parameter := func(key, value string) *csi.GetCapacityRequest {
		return &csi.GetCapacityRequest{Parameters: map[string]string{key: value}}
	}
	at := func(place []*csi.Topology) *csi.GetCapacityRequest {
		return &csi.GetCapacityRequest{AccessibleTopology: place[0]}
	}
	nothing := &csi.GetCapacityResponse{}
	for _, test := range []struct {
		name  string
		lines script
		req   *csi.GetCapacityRequest
		want  *csi.GetCapacityResponse
	}{
		{"whole GiB (CG-1)", script{left(10*volume.GiB, 4*volume.GiB+1)}, &csi.GetCapacityRequest{},
			limits(5 * volume.GiB)},
		{"never negative (CG-1)", script{left(volume.GiB, 2*volume.GiB)}, &csi.GetCapacityRequest{},
			limits(0)},
		{"never too large (CG-1)", script{left(1<<64-1, 0)}, &csi.GetCapacityRequest{}, limits(1 << 62)},
		{"local disks (CG-3)", script{left(10*volume.GiB, 5*volume.GiB)},
			parameter("diskType", "local"), local},
		{"a mode that volumes do not have (CG-2)", nil,
			&csi.GetCapacityRequest{VolumeCapabilities: manyReaders}, nothing},
		{"a parameter that is unknown (CG-2)", nil, parameter("colour", "blue"), nothing},
		{"a placement that nodes do not report (CG-2)", nil, parameter("placement", "instance"), nothing},
		{"another rack (CG-2)", nil, at(csitest.Topologies("rack=b")), nothing},
		{"this rack (CG-2)", script{left(5*volume.GiB, 0)}, at(csitest.Topologies("rack=a")),
			limits(5 * volume.GiB)},
		{"an instance of this rack (CG-2)", script{left(5*volume.GiB, 0)},
			at(instanceAt("rack=a,")), limits(5 * volume.GiB)},
		{"an instance of another rack (CG-2)", nil, at(instanceAt("rack=b,")), nothing},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, test.lines...)
			c.Topology = rackA
			csitest.SameMessage(t, csitest.Got(c.GetCapacity(t.Context(), test.req))(t), test.want)
		})
	}
	c := rackThat(t, left(5*volume.GiB, 0))
	c.TopologyInstance = true
	place := at(instanceAt(""))
	place.Parameters = map[string]string{"placement": "instance"}
	answer := csitest.Got(c.GetCapacity(t.Context(), place))(t)
	csitest.SameMessage(t, answer, limits(5*volume.GiB)) // CG-2: nodes report no rack or zone
	for _, err := range []error{csitest.Call(t.Context(), c, at(instanceAt("rack=a,"))),
		scripted(t, at(csitest.Topologies("rack=a")))} {
		fails(csierr.TopologyInvalid)(t, err) // CG-4
	}
	scriptedCalls{
		{"forbidden (CG-5)", script{forbidden.To(utilization)}, fails(csierr.RoleMissing)},
		{"without a capacity", script{reply(utilization,
			`{"capacity":null,"provisioned":null}`)}, fails(csierr.RackResponseInvalid)},
	}.try(t, &csi.GetCapacityRequest{}, nil)
}

// longRack answers list requests. A page has the requested length, but at most l.most items if most
// is not 0.
type longRack struct {
	project string
	most    int
	items   []string // by id: numbered(i)
	asked   atomic.Int64
}

func (l *longRack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Request-Id", "r-1")
	switch r.URL.Path {
	case "/v1/projects/" + l.project:
		_, _ = io.WriteString(w, racktest.JSON(map[string]any{"id": racktest.ProjectID,
			"name": l.project}))
		return
	case "/v1/me":
		_, _ = io.WriteString(w, racktest.UserOf(racktest.Silo))
		return
	}
	l.asked.Add(1)
	query, from := r.URL.Query(), 0
	limit, _ := strconv.Atoi(query.Get("limit"))
	if l.most > 0 {
		limit = min(limit, l.most)
	}
	if token := query.Get("page_token"); token != "" {
		raw, _ := base64.URLEncoding.DecodeString(token)
		_, _ = fmt.Sscanf(string(raw[max(0, len(raw)-39):]), "%08x-", &from)
		from++
	}
	list := l.items[min(from, len(l.items)):min(from+limit, len(l.items))]
	next := "null"
	if len(list) > 0 {
		next = strconv.Quote(base64.URLEncoding.EncodeToString(fmt.Appendf(nil,
			`{"v":"v1","page_start":{"sort_by":"id_ascending","project":%q,"last_seen":%q}}`,
			racktest.ProjectID, fmt.Sprintf("%08x-91d4-4e6b-b8a7-5c2d9e1f6a43", from+len(list)-1))))
	}
	_, _ = fmt.Fprintf(w, `{"next_page":%s,"items":[%s]}`, next, strings.Join(list, ","))
}

func (l *longRack) controller(t *testing.T) *Service {
	t.Helper()
	server := httptest.NewServer(l)
	t.Cleanup(server.Close)
	c := controllerFor(t, server.URL)
	c.Rack.Project = l.project
	return c
}

type listCall = func(ctx context.Context, c *Service, most int32, token string) ([]string, string,
	error)

var pagedLists = map[string]struct {
	item func(n int) string
	call listCall
}{
	"volumes": {func(n int) string { return listed(n, here) },
		func(ctx context.Context, c *Service, most int32, token string) ([]string, string, error) {
			answer, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: most,
				StartingToken: token})
			if proto.Size(answer) > 4<<20 {
				err = errors.New("the answer is larger than gRPC's limit of 4 MiB")
			}
			return volumeIDs(answer), answer.GetNextToken(), err
		}},
	"snapshots": {func(n int) string { return snapshotOf("ready", with("id", numbered(n))) },
		func(ctx context.Context, c *Service, most int32, token string) (ids []string,
			next string, err error) {
			answer, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: most,
				StartingToken: token})
			for _, e := range answer.GetEntries() {
				ids = append(ids, e.GetSnapshot().GetSnapshotId())
			}
			return ids, answer.GetNextToken(), err
		}},
}

func TestListingAPageSendsAtMostTwoRequests(t *testing.T) { // LV-4, LS-4
	for name, list := range pagedLists {
		for _, project := range []string{racktest.ProjectID, "p", strings.Repeat("x", 63)} {
			for _, most := range []int32{1, 7, 100} {
				t.Run(fmt.Sprintf("%s of %.8s in pages of %d", name, project, most), func(t *testing.T) {
					rack, ids := longRackOf(min(20*int(most)+3, 705), list.item)
					rack.project = project
					walkList(t, rack, list.call, most, ids)
				})
			}
		}
	}
}

func longRackOf(n int, item func(n int) string) (rack *longRack, ids []string) {
	rack = &longRack{project: racktest.Project}
	for i := range n {
		rack.items, ids = append(rack.items, item(i)), append(ids, numbered(i))
	}
	return rack, ids
}

// walkList requests each page from a new controller.
func walkList(t *testing.T, rack *longRack, call listCall, most int32, want []string) {
	t.Helper()
	var all []string
	for token := ""; ; {
		rack.asked.Store(0)
		ids, next, err := call(t.Context(), rack.controller(t), most, token)
		must(t, err)
		if asked := rack.asked.Load(); asked > 2 && most > 0 && rack.most == 0 {
			t.Fatalf("the page behind %q cost %d requests", token, asked)
		}
		if most > 0 && next != "" && len(ids) != int(most) || len(next) > volume.MaxStringBytes {
			t.Fatalf("a page of %d entries with the token %q", len(ids), next)
		}
		all = append(all, ids...)
		if token = next; token == "" {
			break
		}
	}
	if !slices.Equal(all, want) {
		t.Fatalf("in pages of %d, the rack's of %d: got %d ids, want %d: %s", most, rack.most, len(all),
			len(want), cmp.Diff(want, all))
	}
}

func TestListVolumesSplitsResponsesAboveTheGRPCLimit(t *testing.T) { // LV-3
	rack, ids := longRackOf(22000, pagedLists["volumes"].item)
	walkList(t, rack, pagedLists["volumes"].call, 0, ids)
}

func TestAPageTokenThatTheRackRefusesIsInvalid(t *testing.T) { // LV-2
	const token = racktest.Disk + ".yk9TyM9JAQQAAP__" // contains the rack's token "of old"
	refusal := racktest.Error(400, "", "unable to parse query string: failed to parse pagination "+
		"token")
	for _, list := range pagedLists {
		path := map[bool]string{true: listDisks, false: listSnaps}[strings.Contains(list.item(1),
			"block_size")]
		_, _, err := list.call(t.Context(), rackThat(t, refusal.To(path)), 1, token)
		fails(csierr.StartingTokenInvalid)(t, err)
	}
}

const (
	postSnap   = "POST /v1/snapshots"
	deleteSnap = "DELETE /v1/snapshots/" + racktest.Snapshot
	listSnaps  = "GET /v1/snapshots"
)

var viewSnapName = "GET /v1/snapshots/" + volume.SnapshotName("blue", "snap-1")

func TestCreateSnapshotTakesASnapshotOrReturnsTheReason(t *testing.T) {
	answer := &csi.CreateSnapshotResponse{Snapshot: wantedSnapshot(true)}
	busy := racktest.Error(409, "Conflict", "volume repair lock")
	scriptedCalls{
		{"is a read and one request", script{{Want: postSnap, Status: 201,
			Body:  snapshotOf("ready"),
			Query: "project=" + racktest.ProjectID, Check: func(t *testing.T, body []byte) {
				var got map[string]any
				_ = json.Unmarshal(body, &got)
				if got["disk"] != racktest.Disk || got["name"] != volume.SnapshotName("blue", "snap-1") {
					t.Errorf("the body is %s", body)
				}
			}}}, ok},
		{"a volume that is deleted between read and request (CS-4)", script{missing(postSnap),
			noSnapName, ownProject, ownUser, noDisk}, fails(csierr.VolumeNotFound, racktest.Disk)},
		{"a project that cannot be seen (OX-6)", script{missing(postSnap), noSnapName,
			noProject}, unseen},
		{"a second call (CS-5)", script{taken.To(postSnap), snapNamed("ready")}, ok},
		{"a second call, with a full quota (CS-5)", script{full.To(postSnap), snapNamed("ready")}, ok},
		{"a second call, the volume deleted (CS-5)", script{missing(postSnap), snapNamed("ready")}, ok},
		{"another's name (CS-6)", script{taken.To(postSnap), snapNamed("ready", with("disk_id",
			racktest.Image))}, fails(csierr.SnapshotExists, racktest.Image)},
		{"a snapshot made by hand has the name (CS-6)", script{taken.To(postSnap), snapNamed(
			"ready", with("description", "mine"))}, fails(csierr.SnapshotExists, racktest.Snapshot)},
		{"another name's snapshot has its name on the rack (CS-6)", script{taken.To(postSnap),
			snapNamed("ready", tagged(volume.Tag{Name: "snap-2", Cluster: "blue"}))},
			fails(csierr.SnapshotExists)},
		{"the rack destroys the snapshot with the name", script{taken.To(postSnap),
			snapNamed("destroyed")}, fails(csierr.OperationPending)},
		{"the snapshot with the name is gone", script{taken.To(postSnap), noSnapName},
			fails(csierr.OperationPending)},
		{"the rack takes another, or replaces a part of the disk (CS-7)", script{busy.To(postSnap),
			noSnapName, held}, fails(csierr.DiskBusy, "replaces a part")},
		{"a second call, while the rack replaces a part of the disk (CS-5)", script{busy.To(postSnap),
			snapNamed("ready")}, ok},
		{"the rack still takes it for an earlier call (CS-7)", script{busy.To(postSnap),
			snapNamed("creating")}, fails(csierr.DiskBusy, "still taking")},
		{"a second call, while it is taken (CS-7)", script{taken.To(postSnap), snapNamed("creating")},
			fails(csierr.DiskBusy, "still taking")},
		{"the rack answers before it is taken (CS-7)", script{created(postSnap, snapshotOf(
			"creating"))}, fails(csierr.DiskBusy, "still taking")},
		{"the rack takes another volume's with the name (CS-6)", script{busy.To(postSnap),
			snapNamed("creating", with("disk_id", racktest.Image))}, fails(csierr.SnapshotExists,
			racktest.Image)},
		{"a full quota (CS-8)", script{full.To(postSnap), noSnapName}, fails(csierr.RackFull)},
		{"a failed snapshot, deleted (CS-9)", script{created(postSnap, snapshotOf("faulted")),
			snap("faulted"), deletedSnap}, coded(codes.Internal, csierr.SnapshotFaulted, "deleted again")},
		{"a failed snapshot, not deleted (CS-9)", script{created(postSnap, snapshotOf("faulted")), snap(
			"faulted"), forbidden.To(deleteSnap)}, fails(csierr.EffectUnknown, "Forbidden")},
		{"it seems to fail (CS-9)", script{created(postSnap, snapshotOf("faulted")), snap("ready")},
			fails(csierr.DiskBusy)},
		{"an earlier call failed to take it (CS-9)", script{taken.To(postSnap), snapNamed("faulted")},
			coded(codes.Aborted, csierr.SnapshotFaulted)},
	}.after(free).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"a local disk (CS-10)", script{shown("detached", with("disk_type", "local"))},
			fails(csierr.SnapshotImpossible, "local")},
		{"a read-only disk (CS-10)", script{shown("detached", with("read_only", true))},
			fails(csierr.SnapshotImpossible, "read-only")},
		{"a faulted disk (CS-10)", script{shown("faulted")}, fails(csierr.DiskFaulted)},
		{"a disk in creation (CS-10)", script{shown("creating")}, fails(csierr.DiskBusy)},
	}.after(free, noTaking, noSnapName).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"an earlier call took it, and this one is forbidden (CS-5)", script{snapNamed("ready")},
			ok},
	}.after(free, forbidden.To(postSnap)).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"a volume that is gone (CS-4)", script{noDisk, noSnapName, ownProject, ownUser, noDisk},
			fails(csierr.VolumeNotFound, racktest.Disk)},
		{"a volume that is only gone at first (CS-4)", script{noDisk, noSnapName, ownProject, ownUser,
			free}, fails(csierr.OperationPending)},
		{"a volume that is gone, in a project that cannot be seen (OX-6)", script{noDisk, noSnapName,
			noProject}, unseen},
		{"a disk whose import is not finalized (CS-10)", script{shown("import_ready")},
			fails(csierr.DiskImporting, "finalize")},
		{"a second call, the volume deleted before (CS-5)", script{noDisk, snapNamed("ready")}, ok},
	}.try(t, snapshotRequest(), answer)
}

func TestCreateSnapshotRecordsTheFilesystemUUID(t *testing.T) {
	diskWith := func(edit func(*volume.Tag)) string {
		tag := racktest.OwnTag
		edit(&tag)
		return diskOf("detached", tagged(tag))
	}
	for _, test := range []struct{ name, disk, want string }{
		{"a blank disk's filesystem has the disk's id", diskOf("detached"), racktest.Disk},
		{"a restored disk's filesystem has its origin's UUID", diskWith(func(tag *volume.Tag) {
			tag.Origin, tag.FilesystemUUID = volume.OriginSnapshot, racktest.Image
		}), racktest.Image},
		{"a raw volume has no filesystem", diskWith(func(tag *volume.Tag) {
			tag.Use = volume.UseBlock
		}), ""},
		{"nor has a volume for both", diskWith(func(tag *volume.Tag) { tag.Use = volume.UseBoth }), ""},
		{"nor has a disk made by hand", diskOf("detached", with("description", "mine")), ""},
		{"nor has another cluster's disk", diskWith(func(tag *volume.Tag) { tag.Cluster = "red" }), ""},
		{"nor has a disk whose tag was copied", diskOf("detached", with("name", "somebodys-disk")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := snapshotRequest()
			request.Parameters = map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "nightly",
				"csi.storage.k8s.io/volumesnapshot/namespace": "shop"}
			want := volume.Tag{Name: "snap-1", Cluster: "blue", FilesystemUUID: test.want,
				BlockSize: 4096, Claim: "shop/nightly"}
			must(t, scripted(t, request, reply(viewDisk, test.disk), exchange{
				Want: postSnap, Status: 201, Body: snapshotOf("ready"), Check: tags(want)}))
		})
	}
}

func TestCreateSnapshotReadsTheSnapshotByNameAfterALostAnswer(t *testing.T) { // OX-8
	scriptedCalls{
		{"it is there", script{snapNamed("ready")}, ok},
		{"it is being taken (CS-7)", script{snapNamed("creating")}, fails(csierr.DiskBusy)},
		{"another has the name", script{snapNamed("ready", with("disk_id", racktest.Image))},
			fails(csierr.EffectUnknown)},
		{"it is faulted", script{snapNamed("faulted")}, coded(codes.Aborted, csierr.SnapshotFaulted)},
		{"it cannot be read", script{forbidden.To(viewSnapName)}, fails(csierr.EffectUnknown)},
		{"no snapshot has the name", script{noSnapName}, fails(csierr.RackUnavailable)},
	}.after(held, lostSnap).try(t, snapshotRequest(), nil)
}

func wantedSnapshot(ready bool) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: racktest.Snapshot, SourceVolumeId: racktest.Disk,
		SizeBytes: 10 * volume.GiB, ReadyToUse: ready,
		CreationTime: timestamppb.New(time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC))}
}

func TestDeleteSnapshotDeletesOnlyOwnSnapshots(t *testing.T) {
	seen := snap("ready")
	scriptedCalls{
		{"a snapshot that is gone (DS-2)", script{noSnap, ownProject, ownUser, noSnap}, ok},
		{"a snapshot that cannot be seen (OX-6)", script{noSnap, noProject}, unseen},
		{"one taken by hand (D-69)", script{snap("ready", with("description", "before the upgrade"))},
			fails(csierr.DiskNotOurs, "Retain")},
		{"another cluster's snapshot (E-17)", script{snap("ready", tagged(volume.Tag{Name: "snap-1",
			Cluster: "red"}), with("name", volume.SnapshotName("red", "snap-1")))},
			fails(csierr.DiskNotOurs, `"red"`)},
		{"one with the tag of another (E-17)", script{snap("ready", with("name", "by-hand"))},
			fails(csierr.DiskNotOurs, "another name")},
		{"a snapshot in the making (DS-5)", script{snap("creating"), refusing(deleteSnap),
			snap("creating")}, coded(codes.Aborted, csierr.SnapshotNotReady)},
	}.try(t, deleteSnapshotStep, nil)
	scriptedCalls{
		{"is a read and one request", script{deletedSnap}, ok},
		{"a snapshot deleted between read and request (DS-2)", script{missing(deleteSnap),
			noSnap, ownProject, ownUser, noSnap}, ok},
		{"a snapshot that exists although the rack does not find it (OX-6)", script{missing(
			deleteSnap), seen}, fails(csierr.RackResponseInvalid)},
		{"a snapshot that the rack keeps (DS-4)", script{racktest.Error(409, "Conflict",
			"in use").To(deleteSnap), seen}, fails(csierr.Conflict, "in use")},
	}.after(seen).try(t, deleteSnapshotStep, nil)
}

func TestListSnapshotsOmitsUnfinishedSnapshots(t *testing.T) {
	numberedSnap := func(n int, state string, edits ...edit) string {
		return snapshotOf(state, append(edits, with("id", numbered(n)))...)
	}
	viewSeventh := "GET /v1/snapshots/" + numbered(7)
	for _, test := range []struct {
		name  string
		req   *csi.ListSnapshotsRequest
		lines script
		want  string
	}{
		{"all of the project, except those still being taken (LS-5)", &csi.ListSnapshotsRequest{},
			script{reply(listSnaps, pageOf("", numberedSnap(1, "ready", with("description", "mine")),
				numberedSnap(2, "creating"), numberedSnap(3, "faulted"), numberedSnap(4, "destroyed")))},
			"[1:true 3:false]"},
		{"one volume's", &csi.ListSnapshotsRequest{SourceVolumeId: racktest.Disk},
			script{reply(listSnaps, pageOf("", numberedSnap(1, "ready"), numberedSnap(2,
				"ready", with("disk_id", racktest.Image))))}, "[1:true]"},
		{"one", &csi.ListSnapshotsRequest{SnapshotId: numbered(7)},
			script{reply(viewSeventh, numberedSnap(7, "ready"))}, "[7:true]"},
		{"one of another volume", &csi.ListSnapshotsRequest{SnapshotId: numbered(7),
			SourceVolumeId: racktest.Image}, script{reply(viewSeventh, numberedSnap(7, "ready"))}, "[]"},
		{"an unknown one (LS-3)", &csi.ListSnapshotsRequest{SnapshotId: racktest.Snapshot},
			script{noSnap}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer := csitest.Got(rackThat(t, test.lines...).ListSnapshots(t.Context(), test.req))(t)
			got := []string{}
			for _, e := range answer.GetEntries() {
				n := 0
				_, _ = fmt.Sscanf(e.GetSnapshot().GetSnapshotId(), "%x-", &n)
				got = append(got, fmt.Sprintf("%d:%v", n, e.GetSnapshot().GetReadyToUse()))
			}
			if fmt.Sprint(got) != test.want {
				t.Errorf("got %v, want %s", got, test.want)
			}
		})
	}
}

func TestListSnapshotsFailsForASnapshotWithoutACreationTime(t *testing.T) {
	fails(csierr.RackResponseInvalid)(t, scripted(t, &csi.ListSnapshotsRequest{},
		reply(listSnaps, pageOf("", snapshotOf("ready", with("time_created", nil))))))
}

func TestGetSnapshotReturnsUnfinishedSnapshots(t *testing.T) { // LS-7
	scriptedCalls{
		{"one that is being taken", script{snap("creating")}, ok},
		{"an unknown one", script{noSnap}, fails(csierr.SnapshotNotFound)},
	}.try(t, &csi.GetSnapshotRequest{SnapshotId: racktest.Snapshot},
		&csi.GetSnapshotResponse{Snapshot: wantedSnapshot(false)})
}
