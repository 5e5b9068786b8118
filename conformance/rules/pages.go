package rules

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
)

// listPage is a page of a list. The checks read the names in it.
type listPage struct {
	NextPage *string  `json:"next_page"`
	Items    []listed `json:"items"`
}

// listed is an object in a list.
type listed struct {
	ID   string    `json:"id"`
	Name string    `json:"name"`
	Made time.Time `json:"time_created"`
}

func (p listPage) names() string {
	var names []string
	for _, item := range p.Items {
		names = append(names, item.Name)
	}
	return strings.Join(names, " ")
}

// page reads a page.
func (c *Check) page(what, path string) listPage {
	a := c.Send(get(path))
	var page listPage
	if err := json.Unmarshal(a.Body, &page); err != nil || a.Status != 200 {
		c.Fatalf("%s: expected a page; found HTTP %d %s", what, a.Status, a.Body)
	}
	return page
}

// tokenText returns the text in the token of a list of the project that begins after an object.
func (c *Check) tokenText(sortBy, lastSeen string) string {
	return fmt.Sprintf(`{"v":"v1","page_start":{"sort_by":%q,"project":%q,"last_seen":%q}}`, sortBy,
		c.Project, lastSeen)
}

// after returns the query for the page after an object.
func (c *Check) after(sortBy, lastSeen string) string {
	return "page_token=" + url.QueryEscape(base64.URLEncoding.EncodeToString(
		[]byte(c.tokenText(sortBy, lastSeen))))
}

// previous returns the greatest UUID below another one, so that the page after it begins with
// that one.
func previous(id string) string {
	parsed, err := uuid.Parse(id)
	if err != nil {
		return id
	}
	n := new(big.Int).SetBytes(parsed[:])
	n.Sub(n, big.NewInt(1)).FillBytes(parsed[:])
	return parsed.String()
}

func checkPages(c *Check) {
	disks, before := []string{}, c.Name() // an earlier check may have left disks
	var known []listed
	for range 3 {
		known = append(known, itemOf(c.Disk()))
		disks = append(disks, known[len(known)-1].Name)
	}
	id := c.page("the first of the check's disks",
		"/v1/disks?limit=1&"+c.after("name_ascending", string(before))).Items
	if len(id) != 1 || id[0].Name != disks[0] {
		c.Fatalf("the page of one disk after a name: expected %s; found %v", disks[0], id)
	}
	for _, test := range []struct{ what, query, names string }{
		{"two disks after the first by name", "limit=2&" + c.after("name_ascending", disks[0]),
			disks[1] + " " + disks[2]},
		{"two disks before the last by name", "limit=2&" + c.after("name_descending", disks[2]),
			disks[1] + " " + disks[0]},
		{"a disk by ID", "limit=1&" + c.after("id_ascending", previous(id[0].ID)), disks[0]},
		{"a disk after a token, with other parameters",
			"limit=1&project=nobodys&sort_by=name_descending&" + c.after("name_ascending", disks[0]),
			disks[1]},
	} {
		Equal(c, test.what, c.page(test.what, "/v1/disks?"+test.query).names(), test.names)
	}
	c.checkToken("name_ascending", "")
	c.checkToken("id_ascending", "&sort_by=id_ascending")
	if n := len(c.page("disks", "/v1/disks?"+c.inProject()).Items); n > 100 {
		c.Errorf("a page without a limit: expected 100 disks at most; found %d", n)
	}
	c.checkLists(known)
	const token = "failed to parse pagination token: "
	c.Expect(
		expected{"a limit beyond the greatest", get("/v1/disks?limit=99999&" + c.inProject()), ok},
		expected{"a limit of nothing", get("/v1/disks?limit=0&" + c.inProject()),
			badQuery("invalid value: integer `0`, expected a nonzero u32")},
		expected{"a token of 513 bytes", get("/v1/disks?page_token=" + strings.Repeat("A", 513)),
			badQuery(token + "too large")},
		expected{"a token of nothing", get("/v1/disks?page_token=e30="),
			badQuery(token + "corrupted token")},
		expected{"a limit with a sign", get("/v1/disks?limit=%2B2&" + c.inProject()), ok})
	for given, want := range map[string]string{"!": "Invalid symbol 33, offset 0.",
		"A": "Invalid input length: 1", "AA": "Invalid padding", "AB==": "Invalid last symbol 66, " +
			"offset 1.", "A===": "Invalid symbol 61, offset 1.", "AAAA=AAA": "Invalid symbol 61, offset 4.",
		"AA!AA": "Invalid symbol 33, offset 2.", "!AAA!": "Invalid symbol 33, offset 4.",
		"eyJ2IjoidjIifQ==": "corrupted token"} {
		c.Expect(expected{"the token " + given, get("/v1/disks?page_token=" + url.QueryEscape(given)),
			badQuery(token + want)})
	}
}

// checkToken demands that the token of a list's first page belongs to that list.
func (c *Check) checkToken(sortBy, query string) {
	what := "the first disk with " + sortBy
	first := c.page(what, "/v1/disks?limit=1&"+c.inProject()+query)
	if len(first.Items) != 1 || first.NextPage == nil {
		c.Fatalf("%s: expected one disk and a token; found %v", what, first.Items)
	}
	last := first.Items[0].Name
	if sortBy == "id_ascending" {
		last = first.Items[0].ID
	}
	held, err := base64.URLEncoding.DecodeString(*first.NextPage)
	c.must("decode the token behind "+what, err)
	Equal(c, "the token behind "+what, string(held), c.tokenText(sortBy, last))
}

func checkLastPage(c *Check) {
	disk, instance := c.Disk(), c.StoppedInstance()
	path := "/v1/instances/" + instance.Id + "/disks"
	c.checkEmptyPage("an empty list", path)
	_, err := c.Attach(disk.Id, instance.Id)
	c.must("attach a disk", err)
	last := c.page("a list of one disk", path)
	Equal(c, "a list of one disk", last.names(), string(disk.Name))
	if last.NextPage == nil {
		c.Fatalf("the last page that is not empty: expected a token; found null")
	}
	c.checkEmptyPage("the page after the last object",
		path+"?page_token="+url.QueryEscape(*last.NextPage))
	second := c.Disk()
	_, err = c.Attach(second.Id, instance.Id)
	c.must("attach a second disk", err)
	c.checkList("instance_disk_list", path+"?", []listed{itemOf(disk), itemOf(second)},
		*second.TimeCreated, nil)
	Equal(c, "the disks on a page for more than there are",
		len(c.page("a list of two disks", path+"?limit=100").Items), 2)
}

func (c *Check) checkEmptyPage(what, path string) {
	page := c.object(what, c.Send(get(path)))
	Equal(c, what+": its items", string(page["items"]), "[]")
	Equal(c, what+": its token", string(page["next_page"]), "null")
}

func checkQueries(c *Check) {
	disk := c.Disk()
	list := "/v1/disks?" + c.inProject()
	const noOrder = "unknown variant ``, expected one of `name_ascending`, `name_descending`, " +
		"`id_ascending`"
	c.Expect(slices.Concat([]expected{
		{"a limit that is no number", get(list + "&limit=x"), badQuery("invalid digit found in string")},
		{"a limit beyond 32 bits", get(list + "&limit=5000000000"),
			badQuery("number too large to fit in target type")},
		{"an empty limit", get(list + "&limit="), badQuery("cannot parse integer from empty string")},
		{"an empty order", get(list + "&sort_by="), badQuery(noOrder)},
		{"an empty token", get(list + "&page_token="),
			badQuery("failed to parse pagination token: corrupted token")},
		{"an empty project", get("/v1/disks?project="), badQuery(notAName)},
		{"no project", get("/v1/disks"), badQuery("missing field `project`")},
		{"two projects, the first a bad one", get("/v1/disks?limit=1&project=X&" + c.inProject()), ok},
		{"two projects, the last a bad one", get(list + "&project=X"), badQuery(notAName)},
		{"two orders, the first a bad one", get(list + "&limit=1&sort_by=x&sort_by=id_ascending"), ok},
		{"two limits", get(list + "&limit=1&limit=1"), badQuery("duplicate field `limit`")},
	}, []expected{
		{"two projects for one disk", get("/v1/disks/" + string(disk.Name) + "?" + c.inProject() + "&" +
			c.inProject()), badQuery("duplicate field `project`")},
		{"an empty project for an ID", get("/v1/disks/" + disk.Id + "?project="), badQuery(notAName)},
		{"two unknown parameters", get("/v1/disks/" + disk.Id + "?x=1&x=2"), ok},
	})...)
}
