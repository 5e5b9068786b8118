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
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const someID = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"

func TestValidatorsRejectImpossibleValues(t *testing.T) { // OX-12
	const largest = 1 << 62
	image := func(id string, size oxide.ByteCount) error {
		return ValidateImage(someID, &oxide.Image{Id: id, Size: size})
	}
	snapshot := func(id string, size oxide.ByteCount, taken ...time.Time) error {
		s := &oxide.Snapshot{Id: id, Size: size}
		if taken != nil {
			s.TimeCreated = &taken[0]
		}
		return ValidateSnapshot("read", s)
	}
	instance := func(id, project string, state oxide.InstanceState) error {
		return validateInstance(someID, &oxide.Instance{Id: id, ProjectId: project, RunState: state})
	}
	now := time.Now()
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"an image of one byte":                 {image(someID, 1), true},
		"an image of the largest size":         {image(someID, largest), true},
		"another image":                        {image("x", 1), false},
		"an image without bytes":               {image(someID, 0), false},
		"an image that is too large":           {image(someID, largest+1), false},
		"a snapshot of one byte":               {snapshot(someID, 1, now), true},
		"a snapshot of the largest size":       {snapshot(someID, largest, now), true},
		"a snapshot whose id is no UUID":       {snapshot("x", 1, now), false},
		"a snapshot without bytes":             {snapshot(someID, 0, now), false},
		"a snapshot that is too large":         {snapshot(someID, largest+1, now), false},
		"a snapshot without a time":            {snapshot(someID, 1), false},
		"an instance with a state":             {instance(someID, someID, "running"), true},
		"another instance":                     {instance("x", someID, "running"), false},
		"an instance in no project":            {instance(someID, "", "running"), false},
		"an instance without a state":          {instance(someID, someID, ""), false},
		"a quota that counts no CPUs":          {ValidateUtilization(&oxide.Utilization{}), false},
		"a token of one character":             {CheckToken("x"), true},
		"a token that is as long as it may be": {CheckToken(strings.Repeat("x", 4096)), true},
		"a token that is too long":             {CheckToken(strings.Repeat("x", 4097)), false},
		"no token":                             {CheckToken(""), false},
		"a token of two words":                 {CheckToken("a b"), false},
	} {
		if got := c.err == nil; got != c.want {
			t.Errorf("%s: valid is %v (%v)", name, got, c.err)
		}
	}
}

func TestReadsRejectInvalidDisksAndSnapshots(t *testing.T) {
	another, small := with("id", racktest.Image), with("size", 0)
	const noDisk, noSnapshot = csierr.VolumeNotFound, csierr.SnapshotNotFound
	const invalid = csierr.RackResponseInvalid
	for name, c := range map[string]struct {
		disk, snapshot     exchange
		ofDisk, ofSnapshot csierr.Reason
	}{
		"it is unknown": {racktest.NotFound, racktest.NotFound, noDisk, noSnapshot},
		"it is deleted": {racktest.OK("", diskOf("destroyed")),
			racktest.OK("", snapshotOf("destroyed")), noDisk, noSnapshot},
		"it is another": {racktest.OK("", diskOf("detached", another)),
			racktest.OK("", snapshotOf("ready", another)), invalid, invalid},
		"it has no bytes": {racktest.OK("", diskOf("detached", small)),
			racktest.OK("", snapshotOf("ready", small)), invalid, invalid},
	} {
		t.Run(name, func(t *testing.T) {
			client := clientThat(t, c.disk.To(racktest.ViewDisk),
				c.snapshot.To("GET /v1/snapshots/"+racktest.Snapshot))
			fails(c.ofDisk)(t, csitest.Err(client.Disk(t.Context(), racktest.Disk)))
			fails(c.ofSnapshot)(t, csitest.Err(client.Snapshot(t.Context(), racktest.Snapshot)))
		})
	}
}

func TestTransportRepeatsARefusedRequestAtMostOnce(t *testing.T) {
	request := func(method string, body io.Reader) *http.Request {
		return csitest.Got(http.NewRequestWithContext(t.Context(), method, "http://rack", body))(t)
	}
	const get, post = http.MethodGet, http.MethodPost
	broken := request(get, strings.NewReader("disk"))
	broken.GetBody = func() (io.ReadCloser, error) { return http.NoBody, errors.New("no") }
	for name, test := range map[string]struct {
		request *http.Request
		proxy   bool // a proxy refuses the request, not the rack
		sent    int
	}{
		"without a body":                 {request(get, nil), true, 2},
		"with an empty body":             {request(get, http.NoBody), true, 2},
		"with a body that is gone":       {request(get, io.MultiReader(strings.NewReader("a"))), true, 1},
		"with one that cannot be reread": {broken, true, 1},
		"a change":                       {request(post, strings.NewReader("disk")), false, 2},
		"a change, refused by a proxy":   {request(post, strings.NewReader("disk")), true, 1},
	} {
		path, sent := filepath.Join(t.TempDir(), "token"), 0
		writeToken(t, path, "token-0")
		base := roundTripper(func(*http.Request) (*http.Response, error) {
			sent++
			writeToken(t, path, fmt.Sprint("token-", sent))
			header := http.Header{"X-Request-Id": {"r-1"}}
			if test.proxy {
				header = nil
			}
			return &http.Response{StatusCode: http.StatusUnauthorized, Header: header, Request: test.request,
				Body: io.NopCloser(strings.NewReader(rackError(401, "Unauthorized", "no").Body))}, nil
		})
		answer, err := (&Transport{Tokens: tokenFile(path), Base: base}).RoundTrip(test.request)
		must(t, err)
		if must(t, answer.Body.Close()); sent != test.sent {
			t.Errorf("%s it was sent %d times, want %d", name, sent, test.sent)
		}
	}
}

func TestInvalidClientOptionsAreRefused(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(empty, nil, 0o600))
	for want, o := range map[string]Options{
		"OXIDE_HOST":                      {Host: "http://[::1"},
		"OXIDE_CA_FILE (--ca-file): open": {Host: "http://rack", CAFile: empty + ".not"},
		"holds no PEM certificate":        {Host: "http://rack", CAFile: empty},
	} {
		client, _, err := New(o, fixedToken())
		if err == nil || client != nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), empty) {
			t.Errorf("got %v, %v, want %q", client, err, want)
		}
	}
}

var (
	diskGone  = racktest.NotFound.To(racktest.ViewDisk)
	diskThere = racktest.OK(racktest.ViewDisk, diskOf("detached"))
	project   = racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	user      = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Silo))
	noProject = racktest.NotFound.To(racktest.ViewProject)
	// The answer "another" shows another project with the configured name. The answer "anotherSilo" is
	// from another rack, which has a project with the same id.
	another = racktest.OK(racktest.ViewProject, racktest.JSON(map[string]any{"name": racktest.Project,
		"id": racktest.Numbered(9)}))
	anotherSilo = racktest.OK(racktest.ViewUser, racktest.UserOf(racktest.Numbered(8)))
)

func TestADiskCountsAsGoneOnlyIfTheProjectIsUnchanged(t *testing.T) { // DV-2, CU-4
	for _, test := range []struct {
		name  string
		lines []exchange
		ends  func(*testing.T, error)
	}{
		{"it is gone", []exchange{diskGone, project, user, diskGone}, csitest.OK},
		{"the token's role was away for a moment", []exchange{diskGone, project, user,
			diskThere}, fails(csierr.OperationPending)},
		{"the token's role is away", []exchange{diskGone, noProject},
			csitest.Coded(codes.PermissionDenied, csierr.ProjectNotFound)},
		{"another project has the name", []exchange{diskGone, another, user},
			fails(csierr.ProjectChanged)},
		{"another rack has the address", []exchange{diskGone, project, anotherSilo},
			fails(csierr.ProjectChanged)},
		{"the response is about another project", []exchange{diskGone, racktest.OK(racktest.ViewProject,
			`{"id":"`+racktest.Disk+`","name":"puppies"}`)}, fails(csierr.RackResponseInvalid)},
		{"the response has no project", []exchange{diskGone, racktest.OK(racktest.ViewProject,
			`{"id":null,"name":null}`)}, fails(csierr.RackResponseInvalid)},
		{"a proxy's 404", []exchange{diskGone, project, user, {Want: racktest.ViewDisk,
			Status: 404, Body: diskGone.Body, Proxy: true}}, fails(csierr.RackUnknown)},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := clientThat(t, test.lines...)
			fails(csierr.VolumeNotFound)(t, csitest.Err(c.Disk(t.Context(), racktest.Disk)))
			test.ends(t, c.DiskGone(t.Context(), racktest.Disk))
		})
	}
}

func reads(t *testing.T, c *Client) []func() error {
	return []func() error{
		func() error { return csitest.Err(c.Disk(t.Context(), racktest.Disk)) },
		func() error { return csitest.Err(c.Snapshot(t.Context(), racktest.Snapshot)) },
		func() error { return csitest.Err(c.InstanceDisks(t.Context(), racktest.Instance)) },
		func() error { return listDisks(t, c, &Pager{}) },
	}
}

func listDisks(t *testing.T, c *Client, pages *Pager) error {
	return c.EachDisk(t.Context(), pages, func(*oxide.Disk) (enough bool, err error) {
		return false, nil
	})
}

func TestReadsFailWhileAnotherProjectHasTheConfiguredName(t *testing.T) {
	c := clientThat(t, diskThere, another, user, another, user, another, user, another, user, another,
		user, project, user, diskThere)
	csitest.Got(c.Disk(t.Context(), racktest.Disk))(t)
	if got := c.ProjectParam(); got != racktest.ProjectID {
		t.Errorf("the project is asked for as %q", got)
	}
	fails(csierr.ProjectChanged)(t, csitest.Err(c.LookAtWorld(t.Context())))
	for _, read := range reads(t, c) {
		fails(csierr.ProjectChanged)(t, read())
	}
	csitest.Got(c.Disk(t.Context(), racktest.Disk))(t)
}

func TestReadsRefuseObjectsOfAnotherProject(t *testing.T) {
	foreign := with("project_id", racktest.Numbered(9))
	c := clientThat(t, racktest.OK(racktest.ViewDisk, diskOf("detached", foreign)),
		racktest.OK("GET /v1/snapshots/"+racktest.Snapshot, snapshotOf("ready", foreign)),
		racktest.OK("GET /v1/instances/"+racktest.Instance+"/disks", pageOf("",
			diskOf(racktest.AttachedHere, foreign))))
	for _, read := range reads(t, c)[:3] {
		fails(csierr.OtherProject)(t, read())
	}
}

func TestListsRefuseObjectsOfAnotherProject(t *testing.T) {
	foreign := racktest.OK("GET /v1/disks", pageOf("", diskOf("detached",
		with("project_id", racktest.Numbered(9)))))
	c := clientThat(t, foreign, foreign)
	fails(csierr.OtherProject)(t, listDisks(t, c, &Pager{}))
	p := csitest.Got(c.NewPager(t.Context(), packToken(racktest.ProjectID, racktest.Numbered(1),
		"Zm9yZ2Vk"), 0))(t)
	fails(csierr.StartingTokenInvalid)(t, listDisks(t, c, p))
}

func TestStartingTokensContainTheRacksPageToken(t *testing.T) { // LV-2
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

func disk(n int) string { return diskOf("detached", with("id", racktest.Numbered(n))) }

func TestAnEmptyPageDoesNotEndAList(t *testing.T) { // OX-9
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

func TestListsRejectInvalidPages(t *testing.T) { // OX-9
	var empty, many []string
	for n := range maxEmptyPages + 1 {
		empty = append(empty, racktest.PageOf(fmt.Sprint(n)))
	}
	for n := range maxPages + 1 {
		many = append(many, racktest.PageOf(fmt.Sprint(n), disk(n)))
	}
	for words, pages := range map[string][]string{
		"has no list of objects": {`{}`},
		"the page has no list":   {`{"items":null,"next_page":null}`},
		"list of objects":        {racktest.ProjectOf()},
		"is listed twice":        {racktest.PageOf("A", disk(1)), racktest.PageOf("", disk(1))},
		"expected the order":     {racktest.PageOf("", disk(2), disk(1))},
		"its pages repeat":       {racktest.PageOf("A", disk(1)), racktest.PageOf("A", disk(2))},
		"11 pages in a row are":  empty,
		"more than 1000 pages":   many,
	} {
		var script []racktest.Exchange
		for _, page := range pages {
			script = append(script, racktest.OK("GET /v1/disks", page))
		}
		c := clientThat(t, script...)
		fails(csierr.RackResponseInvalid, words)(t, listDisks(t, c, &Pager{}))
	}
}

var rackCodes = []codes.Code{
	codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Internal,
	codes.ResourceExhausted, codes.FailedPrecondition, codes.AlreadyExists, codes.OutOfRange,
	codes.Unavailable,
}

// FuzzRackAnswer checks that every response becomes an error with one of rackCodes and a message
// that Presentable accepts. The error may be "not found" (OX-6) or "already exists" only if the
// body has that error code.
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

// FuzzStartingToken checks that the error for an invalid token is ABORTED, and that the pages after
// a valid token contain every later object once and in order, with any page size.
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
