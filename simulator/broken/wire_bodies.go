package broken

import (
	"bytes"
	"regexp"
)

var wireBodies = []Mutation{
	{
		Name: "A06-no-path", Says: "mistakes in a body are named without their path",
		After: func(x *Interception) {
			if x.Refused(400, "unable to parse JSON body: ") {
				x.EditBody(func(body map[string]any) {
					message, _ := body["message"].(string)
					body["message"] = bodyPath.ReplaceAllString(message, "body: ")
				})
			}
		},
	},
	{
		Name: "A07-unsigned", Says: "byte counts have 64 bits without a sign",
		After: func(x *Interception) {
			if x.Refused(400, "value is too large for a byte count") {
				x.Refuse(400, "InvalidValue", "unsupported value for %q: total size must be less than "+
					"1023 GiB", "size")
			}
		},
	},
	{
		Name: "A08-any", Says: "blocks of 1024 bytes are made blocks of 512",
		Before: func(x *Interception) {
			x.Body = bytes.ReplaceAll(x.Body, []byte(`"block_size":1024`), []byte(`"block_size":512`))
		},
	},
	{
		Name: "A08-one-size", Says: "every blank disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown",
		After:      on(set("block_size", 512), shownDisks...),
	},
	{
		Name: "A12-no-limit", Says: "bodies of more than 1 MiB are read",
		Before: func(x *Interception) { x.Body = bytes.TrimSpace(x.Body) },
	},
	{
		Name: "A12-any-type", Says: "the type of a body does not matter",
		Before: func(x *Interception) { x.Request.Header.Set("Content-Type", "application/json") },
	},
	{
		Name: "A70-cuts", Says: "a description is cut after 512 characters",
		Before: sends("description", first512, "disk_create", "snapshot_create"),
	},
	{
		Name: "A70-cuts-instances", Says: "an instance's description is cut after 512 characters",
		Before: sends("description", first512, "instance_create"),
	},
	{
		Name: "A70-first", Says: "a disk's description is checked before its quota",
		Before: func(x *Interception) {
			if text, _ := x.Sent()["description"].(string); x.Is("disk_create") && first512(text) != text {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A70-bytes", Says: "a description has at most 512 bytes",
		Before: func(x *Interception) {
			text, _ := x.Sent()["description"].(string)
			if x.Is("disk_create", "snapshot_create") && len(text) > 512 {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		},
	},
	{
		Name: "A14-token-first", Says: "the token is checked before anything is read",
		Before: func(x *Interception) {
			if x.Operation != "ping" && x.Request.Header.Get("Authorization") == "" {
				x.Refuse(401, "Unauthorized", "credentials missing or invalid")
			}
		},
	},
	{
		Name: "A63-last-wins", Says: "of a key that is given twice the last value counts",
		Before: func(x *Interception) {
			if body := x.Sent(); body != nil {
				x.Send(body)
			}
		},
	},
}

func first512(text string) string {
	letters := []rune(text)
	return string(letters[:min(len(letters), 512)])
}

// bodyPath matches the path of the field in a refusal.
var bodyPath = regexp.MustCompile(`body: [a-z_.]+: `)
