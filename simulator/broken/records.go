package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

// disk reads the disk that an attach or a detach names, or whose ID is in the path; the zero value
// is none.
func (x *Exchange) disk() (disk store.Disk) {
	name, _ := x.Sent()["disk"].(string)
	if name == "" {
		name = x.Path.Get("disk")
	}
	_ = x.Rack.Records().View(func(tx *store.Tx) error {
		sel, _ := store.ParseSelector(name)
		var err error
		if sel.ID == "" {
			disk, _, err = store.Disks.ByName(tx, x.instance().ProjectID, sel.Name)
			return err
		}
		disk, _, err = store.Disks.Get(tx, sel.ID)
		return err
	})
	return disk
}
