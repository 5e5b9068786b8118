package driver

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
)

func TestAPageWithoutAListIsNoEmptyList(t *testing.T) {
	// An unmarked disk that is attached may be a boot disk: the instances are looked at.
	byHand := listed(1, "attached "+testInstance, with("description", "made by hand"))
	for name, list := range map[string]struct {
		call  func(context.Context, *Controller) error
		lines []exchange
	}{
		"disks": {listVolumes, []exchange{{want: "GET /v1/disks"}}},
		"instances": {listVolumes, []exchange{
			{want: "GET /v1/disks", body: pageOf("", byHand)}, {want: "GET /v1/instances"}}},
		"snapshots": {listSnapshots, []exchange{{want: "GET /v1/snapshots"}}},
	} {
		for _, body := range []string{`{}`, `{"items":null,"next_page":null}`, projectOf()} {
			lines := append([]exchange{}, list.lines...)
			lines[len(lines)-1].body = body
			for i := range lines {
				lines[i].status = 200
			}
			t.Run(name+" as "+body, func(t *testing.T) {
				wantFailure(t, list.call(t.Context(), rackThat(t, lines...)), codes.Internal,
					ReasonRackAnswerWrong)
			})
		}
	}
}

func listVolumes(ctx context.Context, c *Controller) error {
	_, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{})
	return err
}

func listSnapshots(ctx context.Context, c *Controller) error {
	_, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	return err
}

// page is one of a rack's answers: items and the token of the next page.
type page struct {
	items []oxide.Disk
	next  string
}

// visited walks the pages, which are looked up by the token that asks for them.
func visited(t *testing.T, pages map[string]page, most int) (ids []string, err error) {
	t.Helper()
	asked := 0
	err = eachObject(func(token string) ([]oxide.Disk, string, error) {
		if asked++; asked > most {
			t.Fatalf("the driver asked for more than %d pages", most)
		}
		p, ok := pages[token]
		if !ok {
			t.Fatalf("the driver asked for the page %q", token)
		}
		return p.items, p.next, nil
	}, func(d *oxide.Disk) bool {
		ids = append(ids, d.Id)
		return false
	})
	return ids, err
}

func disksOf(ids ...string) []oxide.Disk {
	disks := []oxide.Disk{}
	for _, id := range ids {
		disks = append(disks, oxide.Disk{Id: id})
	}
	return disks
}

func TestOX9PagesThatLoopAreNoList(t *testing.T) {
	for name, pages := range map[string]map[string]page{
		"a page names itself": {"": {disksOf("1"), "A"}, "A": {disksOf("2"), "A"}},
		"the third names the first": {"": {disksOf("1"), "A"}, "A": {disksOf("2"), "B"},
			"B": {disksOf("3"), "A"}},
		"an object comes again on another page": {"": {disksOf("1", "2"), "A"},
			"A": {disksOf("3", "1"), "B"}, "B": {disksOf(), ""}},
		"an object is twice on one page": {"": {disksOf("1", "1"), ""}},
		"a page that is empty loops":     {"": {disksOf(), "A"}, "A": {disksOf(), "A"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := visited(t, pages, 4)
			wantFailure(t, err, codes.Internal, ReasonRackAnswerWrong)
		})
	}
}

func TestOX9EmptyPagesAreNotTheEndAndComeToAnEnd(t *testing.T) {
	pages := map[string]page{"": {disksOf("1"), "A"}, "A": {disksOf(), "B"},
		"B": {disksOf("2"), "C"}, "C": {disksOf(), ""}}
	ids, err := visited(t, pages, 4)
	if err != nil || !slices.Equal(ids, []string{"1", "2"}) {
		t.Errorf("got %q, %v, want both disks", ids, err)
	}
	endless := map[string]page{}
	for token := range 1000 {
		endless[strings.Repeat("x", token)] = page{disksOf(), strings.Repeat("x", token+1)}
	}
	_, err = visited(t, endless, 100)
	wantFailure(t, err, codes.Internal, ReasonRackAnswerWrong)
}
