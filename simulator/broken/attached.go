package broken

import (
	"encoding/json"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// instance reads the instance in the path; the zero value is none.
func (x *Exchange) instance() (instance store.Instance) {
	sel, _ := store.ParseSelector(x.Path.Get("instance"))
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		var err error
		instance, _, err = store.Instances.Get(tx, sel.ID)
		return err
	})
	return instance
}

// attached counts the disks of the instance in the path.
func (x *Exchange) attached() int {
	count := 0
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		disks, err := tx.DisksOf(x.instance().ID)
		count = len(disks)
		return err
	})
	return count
}

// force changes the record of the disk that the request names, past the rules, and answers with it.
func (x *Exchange) force(state store.DiskState) {
	disk := x.disk()
	disk.State = state
	err := x.Rack.Records().Update(func(tx *store.Tx) error { return tx.PutDisk(disk) })
	if err != nil {
		x.Refuse(500, "Internal", "Internal Server Error")
		return
	}
	x.accept(disk)
}

// accept answers 202 with an object.
func (x *Exchange) accept(object any) {
	body, _ := json.Marshal(object)
	x.Answer = &Answer{Status: 202, Header: http.Header{}, Body: body}
}

// on is a change of the answer to these operations.
func on(change func(map[string]any), operations ...string) func(*Exchange) {
	return func(x *Exchange) {
		if x.Is(operations...) {
			x.Edit(change)
		}
	}
}

// reword changes the answers that are errors with this status and text: to another status, code and
// message, of which "" is the same as before.
func reword(status int, text string, want int, code, message string) func(*Exchange) {
	return func(x *Exchange) {
		if !x.Refused(status, text) {
			return
		}
		x.Answer.Status = want
		x.EditBody(func(body map[string]any) {
			if code != "" {
				body["error_code"] = code
			}
			if message != "" {
				body["message"] = message
			}
		})
	}
}
