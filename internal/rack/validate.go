package rack

import (
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// A response has to contain what the driver decides from, and has to be about the requested object.
// ValidateDisk checks disks, ValidateSnapshot snapshots.

func validateInstance(id oxide.NameOrId, i *oxide.Instance) error {
	const doing = "read instance"
	switch {
	case i.Id != string(id):
		return InvalidResponse(doing, "asked for the instance %s and got %.80q", id, i.Id)
	case !volume.IsID(i.ProjectId):
		return InvalidResponse(doing, "the instance %s is in no project", id)
	case i.RunState == "":
		return InvalidResponse(doing, "the instance %s has no state", id)
	}
	return nil
}

// ValidateImage checks an image in a response.
func ValidateImage(id oxide.NameOrId, i *oxide.Image) error {
	const doing = "read image"
	switch {
	case i.Id != string(id):
		return InvalidResponse(doing, "asked for the image %s and got %.80q", id, i.Id)
	case i.Size == 0 || i.Size > 1<<62:
		return InvalidResponse(doing, "the image %s has %d bytes", id, i.Size)
	}
	return nil
}

// ValidateUtilization distinguishes a capacity of zero from a response without one: a rack always
// counts CPUs too.
func ValidateUtilization(u *oxide.Utilization) error {
	if u.Capacity.Cpus == nil || u.Provisioned.Cpus == nil {
		return InvalidResponse("read utilization", "it has no capacity")
	}
	return nil
}
