package broken

import "slices"

// disks are the mutations of creating and deleting disks.
var disks = slices.Concat(diskLife, diskLimits)
