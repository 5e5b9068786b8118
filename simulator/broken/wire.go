package broken

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var wire = []Mutation{
	{Name: "A01-no-code", Says: "errors have no error_code", DriverSays: "RackUnknown",
		After: func(x *Interception) {
			if x.Answer.Status >= 400 {
				x.EditBody(func(body map[string]any) { delete(body, "error_code") })
			}
		}},
	{Name: "A01-taken-name-is-reused",
		Says:       "creating a disk whose name is taken returns the disk that has it",
		DriverSays: "EffectUnknown",
		Before: func(x *Interception) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Reply(201, d)
			}
		}},
	{Name: "A02-no-time", Says: "a snapshot has no time of creation",
		DriverSays: "RackResponseInvalid",
		After: on(func(object map[string]any) { delete(object, "time_created") },
			shownSnapshots...)},
	{Name: "A03-slot", Says: "device_path is the PCI address of the disk's slot",
		After: on(set("device_path", "/dev/pci/0000:00:10.0"), shownDisks...)},
	{Name: "A04-cut", Says: "names are cut after 16 characters", DriverSays: "RackResponseInvalid",
		Before: sends("name", func(name string) string {
			if len(name) >= 64 {
				return name
			}
			return name[:min(len(name), 16)]
		}, "disk_create")},
	{Name: "A05-another-disk", Says: "a read by ID returns another disk",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			id := x.Path.Get("disk")
			if x.Is("disk_view") && uuid.Validate(id) == nil {
				for _, d := range all(x, store.Disks) {
					if d.ID != strings.ToLower(id) {
						x.Request.URL.Path = "/v1/disks/" + d.ID
					}
				}
			}
		}},
	{Name: "A61-tidy", Says: "the rack resolves dots in a path",
		Before: func(x *Interception) {
			url := x.Request.URL
			for _, dots := range []string{"/./", "/disks/../"} {
				url.Path = strings.Replace(url.Path, dots, "/", 1)
			}
		}},
	{Name: "A06-code", Says: "errors about a body have an error_code",
		After: reword(400, "unable to parse JSON body: ", 400, "InvalidRequest", "")},
	{Name: "A07-unsigned", Says: "byte counts have 64 bits without a sign",
		After: reword(400, "value is too large for a byte count", 400, "InvalidValue",
			`unsupported value for "size": total size must be less than 1023 GiB`)},
	{Name: "A08-one-size", Says: "every blank disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown", After: on(set("block_size", 512), shownDisks...)},
	{Name: "A12-no-limit", Says: "the rack reads bodies of more than 1 MiB",
		Before: func(x *Interception) { x.Body = bytes.TrimSpace(x.Body) }},
	{Name: "A70-bad-request", Says: "a description that is too long gets 400",
		After: reword(500, "Internal Server Error", 400, "InvalidValue", "description is too long")},
	{Name: "A14-token-first", Says: "the rack checks the token before it reads anything else",
		Before: func(x *Interception) {
			if x.Operation != "ping" && x.Request.Header.Get("Authorization") == "" {
				x.Refuse(401, "Unauthorized", "credentials missing or invalid")
			}
		}},
	{Name: "A63-last-wins", Says: "of two values of a key, the last one counts",
		Before: func(x *Interception) {
			if body := x.Sent(); body != nil {
				x.Send(body)
			}
		}},
	{Name: "A09-first-page-again", Says: "a page token leads to the first page again",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			if token := x.pageToken(); x.isList() && token != nil {
				x.query(func(query map[string][]string) {
					delete(query, "page_token")
					query["sort_by"] = []string{token["sort_by"]}
					if token["project"] != "" {
						query["project"] = []string{token["project"]}
					}
				})
			}
		}},
	{Name: "A09-one-order", Says: "lists are always in the order of names",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			if x.isList() {
				x.query(func(query map[string][]string) {
					if slices.Contains(query["sort_by"], "id_ascending") {
						query["sort_by"] = []string{"name_ascending"}
					}
				})
			}
		}},
	{Name: "A10-endless", Says: "an empty page also has a token",
		DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if page["next_page"] == nil {
						page["next_page"] = x.sameToken()
					}
				})
			}
		}},
	{Name: "A10-no-items", Says: "an empty page has no list", DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if items, is := page["items"].([]any); is && len(items) == 0 {
						delete(page, "items")
					}
				})
			}
		}},
	{Name: "A62-first-wins", Says: "of two values of a parameter, the first one counts",
		Before: func(x *Interception) {
			x.query(func(query map[string][]string) {
				for name, values := range query {
					query[name] = values[:1]
				}
			})
		}},
	{Name: "A72-listed", Says: "a list shows disks without device_path",
		After: on(set("device_path", ""), "disk_list")},
	{Name: "A11-forbidden", Says: "a wrong token gets 403",
		After: reword(401, "", 403, "Forbidden", "Forbidden")},
	{Name: "A13-any", Says: "a future version is treated as the newest one",
		Before: func(x *Interception) {
			if x.Request.Header.Get("Api-Version") > "9" {
				x.Request.Header.Del("Api-Version")
			}
		}},
	{Name: "A15-not-found", Says: "a caller who may read but not change an object gets 404",
		DriverSays: "DiskBusy",
		After: func(x *Interception) {
			if x.Answer.Status == 403 && x.Is("disk_delete") {
				x.Refuse(404, "ObjectNotFound", "not found: disk with id %q", x.Path.Get("disk"))
			}
		}},
	{Name: "A21-another-silo", Says: "a request for another silo gets 403",
		After: reword(404, "silo with id", 403, "Forbidden", "Forbidden")},
	{Name: "A18-undone", Says: "a creation is undone if its caller gives up",
		Before: func(x *Interception) {
			if !x.Is("disk_create") || x.Rack.Switches().CreateHold == 0 {
				return
			}
			d := x.halfMade(store.StateCreating)
			x.putDisk(d)
			waited := x.Rack.Pause(x.Request.Context(), time.Duration(x.Rack.Switches().CreateHold))
			_ = x.Rack.Records().Update(func(tx *store.Tx) { store.Disks.Delete(tx, d) })
			if !waited {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}},
	{Name: "A19-left-behind", Says: "a creation that fails leaves a faulted disk",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Answer.Status == 500 {
				x.leaveFaulted()
			}
		}},
}

func (x *Interception) pageToken() map[string]string {
	data, _ := base64.URLEncoding.DecodeString(x.Request.URL.Query().Get("page_token"))
	var token struct {
		Start map[string]string `json:"page_start"`
	}
	if json.Unmarshal(data, &token) != nil {
		return nil
	}
	return token.Start
}

// sameToken returns the token in the query. If there is none, it returns a token for the page after
// the last object, which is empty.
func (x *Interception) sameToken() string {
	query := x.Request.URL.Query()
	if token := query.Get("page_token"); token != "" {
		return token
	}
	start := map[string]string{"sort_by": "name_ascending", "last_seen": "zzz"}
	if project := query.Get("project"); project != "" {
		start["project"] = project
	}
	text, _ := json.Marshal(map[string]any{"v": "v1", "page_start": start}) // strings always encode
	return base64.URLEncoding.EncodeToString(text)
}

func (x *Interception) leaveFaulted() {
	d := x.halfMade(store.StateFaulted)
	x.putDisk(d)
	x.addStorage(d.Size)
}

func (x *Interception) halfMade(state string) store.Disk {
	body := x.Sent()
	name, _ := body["name"].(string)
	description, _ := body["description"].(string)
	return store.Disk{Identity: store.NewIdentity(uuid.NewString(), name, description),
		ProjectID: x.projectID(), Size: 1 << 30, BlockSize: 4096, DevicePath: "/mnt/" + name,
		DiskType: store.TypeDistributed, State: store.DiskState{State: state}}
}
