package rules

import (
	_ "embed"
	"regexp"
	"slices"
	"strings"
)

// assumptions is the table of the rules: what each says, why it matters and how we know it.
//
//go:embed ASSUMPTIONS.md
var assumptions string

// table has the operations that the check of each rule is about, and the check.
var table = []struct {
	id, calls string
	check     func(*Check)
}{
	{"A01", "disk_create disk_view", checkErrors},
	{"A02", "disk_create disk_view snapshot_create snapshot_view", checkTimes},
	{"A03", "disk_create disk_view", checkDevicePath},
	{"A04", "disk_create", checkNames},
	{"A05", "disk_view disk_list snapshot_view instance_view image_view project_view",
		checkNamesAndIDs},
	{"A06", "disk_create", checkBodies},
	{"A07", "disk_create", checkByteCounts},
	{"A08", "disk_create disk_view", checkBlockSizes},
	{"A09", "disk_create disk_list snapshot_list instance_list image_list", checkPages},
	{"A10", "instance_disk_list instance_disk_attach", checkLastPage},
	{"A11", "ping current_user_view", checkTokens},
	{"A12", "disk_create", checkBodyLimits},
	{"A13", "ping current_user_view", checkVersions},
	{"A14", "disk_create disk_view disk_list", checkOrderOfReading},
	{"A15", "utilization_view image_list", checkRoles},
	{"A16", "instance_create instance_disk_attach instance_disk_detach", checkNumberOfDisks},
	{"A17", "instance_disk_attach instance_disk_detach", checkHotplug},
	{"A18", "disk_view", checkAbandonedSaga},
	{"A19", "disk_create disk_view", checkFailedSaga},
	{"A20", "utilization_view instance_start instance_stop", checkProvisioned},
	{"A21", "current_user_view utilization_view", checkFleet},
	{"A22", "disk_create disk_view disk_delete", checkNewDisk},
	{"A23", "disk_create snapshot_create", checkReadOnlyDisk},
	{"A24", "disk_delete disk_view", checkFailedDelete},
	{"A25", "disk_create", checkDiskSizes},
	{"A26", "disk_create disk_view snapshot_create", checkLocalDisk},
	{"A27", "disk_create", checkNoSpace},
	{"A28", "disk_create", checkOrderOnCreate},
	{"A29", "utilization_view disk_create snapshot_create disk_delete", checkQuota},
	{"A30", "instance_disk_attach instance_disk_detach", checkWhatIsAttached},
	{"A31", "instance_disk_attach instance_disk_detach instance_disk_list disk_view",
		checkAttachAtOnce},
	{"A32", "instance_disk_attach", checkAttachWhileCreating},
	{"A33", "instance_disk_attach", checkRepeatedAttach},
	{"A34", "instance_disk_attach", checkAttachRefusals},
	{"A35", "instance_disk_attach instance_disk_detach", checkLocalDisks},
	{"A36", "instance_disk_detach", checkRepeatedDetach},
	{"A37", "instance_disk_detach", checkDetachRefusals},
	{"A38", "snapshot_create snapshot_view disk_view", checkTaking},
	{"A39", "snapshot_create", checkRepairLock},
	{"A40", "snapshot_create snapshot_view disk_create disk_view", checkInheritedBlocks},
	{"A41", "snapshot_create", checkOrderOnSnapshot},
	{"A42", "snapshot_create", checkUnfitDisk},
	{"A43", "snapshot_create snapshot_view snapshot_delete disk_delete", checkSurvival},
	{"A44", "image_list image_view", checkImages},
	{"A45", "instance_start instance_stop", checkStart},
	{"A46", "instance_start instance_stop", checkStop},
	{"A47", "instance_reboot", checkReboot},
	{"A48", "instance_delete", checkDeleteInstance},
	{"A49", "instance_update", checkUpdate},
	{"A50", "instance_create", checkInstanceSize},
	{"A51", "instance_create disk_view", checkUndoneInstance},
	{"A52", "instance_create instance_network_interface_list", checkInterfaces},
	{"A53", "instance_create instance_start instance_stop instance_reboot", checkChangeWhileCreating},
	{"A54", "instance_disk_list", checkSerials},
	{"A55", "instance_view", checkFirmware},
	{"A56", "instance_disk_list", checkPadding},
	{"A57", "instance_disk_attach instance_disk_detach", checkDeviceNumbers},
	{"A58", "instance_create", checkStartAfterCreation},
	{"A59", "snapshot_create disk_create", checkUnfinishedSource},
	{"A60", "instance_reboot instance_start", checkFailedReboot},
	{"A61", "disk_view", checkPaths},
	{"A62", "disk_list disk_view", checkQueries},
	{"A63", "disk_create", checkRepeatedKeys},
	{"A64", "instance_create", checkWhereInterfacesAre},
	{"A65", "instance_create instance_external_ip_list", checkExternalAddresses},
	{"A66", "instance_create", checkCreationOrder},
	{"A67", "instance_disk_attach instance_disk_detach", checkUnreadAttachments},
	{"A68", "disk_create disk_delete snapshot_create snapshot_delete", checkSoftDelete},
	{"A69", "instance_disk_list", checkWriteCache},
	{"A70", "disk_create snapshot_create instance_create", checkDescriptions},
	{"A71", "disk_delete disk_view", checkDeleteAttached},
	{"A72", "disk_create disk_view disk_list instance_disk_list snapshot_create snapshot_view " +
		"snapshot_list instance_create instance_view instance_list", checkAlike},
	{"A90", "disk_bulk_write_import_start disk_bulk_write_import disk_bulk_write_import_stop " +
		"disk_finalize_import disk_delete", checkImport},
	{"A91", "image_create image_view image_delete disk_create", checkImageLife},
}

// lookFirst finds the driver's look before a change in the reason for a rule.
var lookFirst = regexp.MustCompile("The driver looks first \\(`(\\w+)`\\)")

// All lists the rules of ASSUMPTIONS.md in the order of their IDs, each with its check.
func All() []Rule {
	var all []Rule
	for line := range strings.Lines(assumptions) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		if len(cells) != 4 || cells[0][0] != 'A' {
			continue
		}
		rule := Rule{ID: cells[0], Says: cells[1], Why: cells[2], Source: cells[3]}
		if look := lookFirst.FindStringSubmatch(rule.Why); look != nil {
			rule.Look = look[1]
		}
		for _, row := range table {
			if row.id == rule.ID {
				rule.Calls, rule.Check = strings.Fields(row.calls), row.check
			}
		}
		all = append(all, rule)
	}
	slices.SortFunc(all, func(a, b Rule) int { return strings.Compare(a.ID, b.ID) })
	return all
}
