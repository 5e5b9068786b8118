package rules

import "slices"

// diskRules are about creating and deleting disks, and about their share of the quota.
var diskRules = slices.Concat(diskLifeRules, diskLimitRules)
