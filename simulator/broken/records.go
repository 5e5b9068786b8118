package broken

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

// disk returns the disk of an attach, a detach or a path with a disk's ID, or the zero value.
func (x *Interception) disk() (disk store.Disk) {
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
