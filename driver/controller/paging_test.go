package controller

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// longRack lists disks or snapshots as a rack does, in pages of the requested length, and counts
// the requests. No page has more than most items, unless most is 0.
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

// listCall makes a list call and returns what it lists, and the token of the next page.
type listCall = func(ctx context.Context, c *Service, most int32, token string) ([]string, string,
	error)

// pagedLists are ListVolumes and ListSnapshots, with the rack's lists for them.
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
	"snapshots": {func(n int) string { return snapshotOf("ready", with("id", racktest.Numbered(n))) },
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

func TestLV4AndLS4APageTakesTwoRequestsHoweverLongTheListIs(t *testing.T) {
	for name, list := range pagedLists {
		for _, project := range []string{racktest.ProjectID, "p", strings.Repeat("x", 63)} {
			for _, most := range []int32{1, 7, 100} {
				t.Run(fmt.Sprintf("%s of %.8s in pages of %d", name, project, most),
					func(t *testing.T) {
						rack := &longRack{project: project}
						for n := range min(20*int(most)+3, 705) {
							rack.items = append(rack.items, list.item(n))
						}
						walkAll(t, rack, list.call, most)
					})
			}
		}
	}
}

// walkList lists everything in pages, each from another controller.
func walkList(t *testing.T, rack *longRack, call listCall, most int32) (all []string) {
	t.Helper()
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
			return all
		}
	}
}

// walkAll checks that a walk lists every item of the rack once, in order.
func walkAll(t *testing.T, rack *longRack, call listCall, most int32) {
	t.Helper()
	all := walkList(t, rack, call, most)
	for n, id := range all {
		if id != racktest.Numbered(n) {
			t.Fatalf("entry %d is %s", n, id)
		}
	}
	if len(all) != len(rack.items) {
		t.Fatalf("%d entries of %d", len(all), len(rack.items))
	}
}

func TestLV4AListInAnotherOrderIsAnErrorAndNotAShorterList(t *testing.T) {
	for name, list := range pagedLists {
		t.Run(name, func(t *testing.T) {
			rack := &longRack{project: racktest.Project}
			for _, n := range []int{1, 2, 7, 3, 4} {
				rack.items = append(rack.items, list.item(n))
			}
			_, _, err := list.call(t.Context(), rack.controller(t), 0, "")
			csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
		})
	}
}

func TestLV3AResponseThatWouldBeTooLargeIsPaged(t *testing.T) {
	rack := &longRack{project: racktest.Project}
	for n := range 22000 {
		rack.items = append(rack.items, listed(n, here))
	}
	walkAll(t, rack, pagedLists["volumes"].call, 0)
}

func TestLV2ATokenThatTheRackRefusesIsInvalid(t *testing.T) {
	const token = racktest.Disk + ".yk9TyM9JAQQAAP__" // for a page that the rack calls "of old"
	refusal := racktest.Error(400, "", "unable to parse query string: failed to parse pagination "+
		"token")
	for _, list := range pagedLists {
		path := map[bool]string{true: listDisks, false: listSnaps}[strings.Contains(list.item(1),
			"block_size")]
		_, _, err := list.call(t.Context(), rackThat(t, refusal.To(path)), 1, token)
		csitest.Want(t, err, codes.Aborted, csierr.StartingTokenInvalid)
	}
}
