package rack

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestAStartingTokenContainsTheRacksToken(t *testing.T) { // LV-2
	page := base64.URLEncoding.EncodeToString([]byte(
		`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"kittens","last_seen":"` +
			racktest.Disk + `"}}`))
	token := packToken(racktest.Project, racktest.Disk, page)
	if after, got, ok := unpackToken(racktest.Project,
		token); !ok || after != racktest.Disk || got != page || len(token) > volume.MaxStringBytes {
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

func TestAnEmptyPageDoesNotEndAList(t *testing.T) { // OX-9
	disk := func(n int) string {
		return racktest.DiskOf("detached", racktest.With("id", racktest.Numbered(n)))
	}
	c := clientThat(t, racktest.OK("GET /v1/disks", racktest.PageOf("A", disk(1))),
		racktest.OK("GET /v1/disks", racktest.PageOf("B")), racktest.OK("GET /v1/disks",
			racktest.PageOf("C", disk(2))), racktest.OK("GET /v1/disks", racktest.PageOf("")))
	var ids []string
	err := c.EachDisk(t.Context(), &Pager{}, func(d *oxide.Disk) (enough bool, err error) {
		ids = append(ids, d.Id)
		return false, nil
	})
	if err != nil || !slices.Equal(ids, []string{racktest.Numbered(1), racktest.Numbered(2)}) {
		t.Errorf("the disks are %q, %v; want both", ids, err)
	}
}

func TestAPageWithoutAListIsAnError(t *testing.T) { // OX-9
	for _, body := range []string{`{}`, `{"items":null,"next_page":null}`, racktest.ProjectOf()} {
		c := clientThat(t, racktest.OK("GET /v1/disks", body))
		fails(csierr.RackResponseInvalid)(t, listDisks(t, c, &Pager{}))
	}
}

var rackCodes = []codes.Code{
	codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Internal,
	codes.ResourceExhausted, codes.FailedPrecondition, codes.AlreadyExists, codes.OutOfRange,
	codes.Unavailable,
}

// FuzzRackAnswer checks that any response becomes an error with one of rackCodes and a presentable
// message, and that only a response of the rack itself means "not found" (OX-6) or "exists
// already".
func FuzzRackAnswer(f *testing.F) {
	f.Fuzz(func(t *testing.T, code uint16, body []byte, missing uint8) {
		response := &http.Response{
			StatusCode: 300 + int(code)%300, Body: io.NopCloser(bytes.NewReader(body)),
			ContentLength: int64(len(body)) + int64(missing),
			Header:        http.Header{"Server": {"tweety/" + spy}},
			Request:       httptest.NewRequest(http.MethodPost, "https://"+spy+"/v1/disks", nil),
		}
		cause := oxide.NewHTTPError(response)
		err := Error(t.Context(), "create disk", cause)
		csitest.Presentable(t, err, rackCodes...)
		if strings.Contains(err.Error(), spy) {
			t.Fatalf("it shows the rack's address or a header: %v", err)
		}
		var said struct {
			ErrorCode string `json:"error_code"`
		}
		_ = json.Unmarshal(body, &said)
		got := status.Code(err)
		if got == codes.NotFound && said.ErrorCode != "ObjectNotFound" ||
			got == codes.AlreadyExists && said.ErrorCode != "ObjectAlreadyExists" {
			t.Fatalf("HTTP %d with %q is %v", response.StatusCode, body, got)
		}
		if (NotFound(cause) || errors.Is(cause, oxide.ErrObjectAlreadyExists)) && Refused(cause) {
			t.Fatalf("HTTP %d with %q is unknown and refused at once", response.StatusCode, body)
		}
	})
}

// FuzzTransport checks that the text of a failed call does not show the rack's address.
func FuzzTransport(f *testing.F) {
	f.Fuzz(func(t *testing.T, why string) {
		failure := `Get "https://` + spy + `/v1/disks?project=x": ` + why
		err := Error(t.Context(), "list disks", errors.New(failure))
		csitest.Presentable(t, err, codes.Unavailable)
		if strings.Contains(err.Error(), spy) && !strings.Contains(why, spy) {
			t.Fatalf("%q becomes %v", failure, err)
		}
	})
}

const spy = "tweetytweety"

// FuzzStartingToken checks that an invalid token is ABORTED, and that the pages after a valid token
// show every later object once, in order, however long the pages are.
func FuzzStartingToken(f *testing.F) {
	var ids []string
	for i := range 40 {
		ids = append(ids, fmt.Sprintf("%08x-0000-4000-8000-000000000000", i*0x06000000))
	}
	c := &Client{Project: racktest.Project, world: world{ids: World{racktest.ProjectID,
		racktest.Silo}}}
	f.Fuzz(func(t *testing.T, token string, most int32) {
		_, err := c.NewPager(t.Context(), token, most)
		after, _, paged := strings.Cut(token, ".")
		switch ours := token == "" || csitest.UUID.MatchString(after) && (!paged || err == nil); {
		case most < 0:
			csitest.Presentable(t, err, codes.InvalidArgument)
			return
		case !ours:
			csitest.Presentable(t, err, codes.Aborted)
			return
		case err != nil:
			t.Fatalf("the token %q is refused: %v", token, err)
		}
		var shown, want []string
		for _, id := range ids {
			if id > after {
				want = append(want, id)
			}
		}
		for at, turn := token, 0; ; turn++ {
			page, err := c.NewPager(t.Context(), at, most)
			if err != nil || turn > len(ids) {
				t.Fatalf("page %d, with the token %q: %v", turn, at, err)
			}
			before := len(shown)
			for _, id := range ids {
				if page.Take(id, &csi.Volume{}) {
					shown = append(shown, id)
				}
				if page.Full() {
					break
				}
			}
			if most > 0 && len(shown)-before > int(most) {
				t.Fatalf("a page of %d, where %d were asked for", len(shown)-before, most)
			}
			if at = page.Next; at == "" {
				break
			}
		}
		if !slices.Equal(shown, want) {
			t.Fatalf("behind %q in pages of %d: %q, want %q", token, most, shown, want)
		}
	})
}
