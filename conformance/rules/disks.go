package rules

import "slices"

// diskRules are about creating and deleting disks, and what they take of the quota.
var diskRules = slices.Concat(diskLifeRules, diskLimitRules)
