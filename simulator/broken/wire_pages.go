package broken

import (
	"encoding/base64"
	"encoding/json"
	"slices"
)

var wirePages = []Mutation{
	{
		Name: "A09-first-page-again", Says: "the page after a token is the first one again",
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
		},
	},
	{
		Name: "A09-one-order", Says: "lists are in the order of names, whatever is asked for",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			if x.isList() {
				x.query(func(query map[string][]string) {
					if slices.Contains(query["sort_by"], "id_ascending") {
						query["sort_by"] = []string{"name_ascending"}
					}
				})
			}
		},
	},
	{
		Name: "A10-no-token-at-the-end", Says: "the last page that is not empty has no token",
		After: func(x *Interception) {
			if x.Succeeded("instance_disk_list") {
				x.EditBody(func(page map[string]any) { page["next_page"] = nil })
			}
		},
	},
	{
		Name: "A10-endless", Says: "the empty page has a token as well",
		DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if page["next_page"] == nil {
						page["next_page"] = x.sameToken()
					}
				})
			}
		},
	},
	{
		Name: "A10-no-items", Says: "the empty page has no list", DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if items, is := page["items"].([]any); is && len(items) == 0 {
						delete(page, "items")
					}
				})
			}
		},
	},
	{
		Name: "A62-first-wins", Says: "of a parameter that is given twice the first value counts",
		Before: func(x *Interception) {
			x.query(func(query map[string][]string) {
				for name, values := range query {
					query[name] = values[:1]
				}
			})
		},
	},
	{
		Name: "A62-empty-is-absent", Says: "an empty parameter counts as absent",
		Before: func(x *Interception) {
			x.query(func(query map[string][]string) {
				for name, values := range query {
					if values[0] == "" {
						delete(query, name)
					}
				}
			})
		},
	},
}

// pageToken returns the content of the query's token, or nil.
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

// sameToken returns the query's token. Without one it returns the token of the page after the
// last object.
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
