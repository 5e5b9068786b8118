package rack

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestLV2AStartingTokenContainsTheRacksToken(t *testing.T) {
	page := base64.URLEncoding.EncodeToString([]byte(
		`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"kittens","last_seen":"` +
			racktest.Disk + `"}}`))
	token := packToken(racktest.Project, racktest.Disk, page)
	if after, got, ok := unpackToken(racktest.Project,
		token); !ok || after != racktest.Disk || got != page ||
		len(token) > volume.MaxStringBytes {
		t.Errorf("%q becomes %q, which is %q, %q, %t", page, token, after, got, ok)
	}
	for _, bad := range []string{token + "A", token[:len(token)-4], racktest.Disk + ".",
		racktest.Disk + ".AAAA",
		strings.ToUpper(token), "." + token, token + "." + token} {
		if after, got, ok := unpackToken(racktest.Project, bad); ok {
			t.Errorf("%q is a token: %q, %q", bad, after, got)
		}
	}
	for _, odd := range []string{"", "no base64!", strings.Repeat("A", 501), page + "\n"} {
		if got := packToken(racktest.Project, racktest.Disk, odd); got != racktest.Disk {
			t.Errorf("the rack's token %q becomes %q", odd, got)
		}
	}
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

func TestOX9PagesThatRepeatAreAnError(t *testing.T) {
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
			csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
		})
	}
}

func TestOX9EmptyPagesAreSkippedUpToALimit(t *testing.T) {
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
	csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
}

func TestOX9APageWithoutAListIsAnError(t *testing.T) {
	for _, body := range []string{`{}`, `{"items":null,"next_page":null}`, racktest.ProjectOf()} {
		c := clientThat(t, racktest.OK("GET /v1/disks", body))
		csitest.Want(t, c.EachDisk(t.Context(), &Pager{}, func(*oxide.Disk) bool { return false }),
			codes.Unavailable, csierr.RackResponseInvalid)
	}
}
