package doctor

import "github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"

// rackAdvices is what follows from errors of the rack.
var rackAdvices = map[csierr.Reason]advice{
	csierr.TokenRejected: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Put a new token into the Secret; the driver reads it without a restart.",
		Next:     checkRack,
	},
	csierr.TokenFileUnreadable: {
		Link:     LinkRack,
		ByItself: "Calls continue with the token read last, until the rack refuses it.",
		Do:       "Restore the file, or repair its mount; the driver reads it without a restart.",
		Next:     controllerLog,
	},
	csierr.RoleMissing: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Give the token's user the role limited-collaborator on the project.",
		Next:     checkRack,
	},
	csierr.ProjectNotFound: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Correct OXIDE_PROJECT, or give the token's user a role on the project.",
		Next:     checkRack,
	},
	csierr.ObjectNotFound: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Check whether somebody deleted the object.",
		Next:     controllerLog,
	},
	csierr.NameTaken: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Find the object with the name on the rack.",
		Next:     controllerLog,
	},
	csierr.ValueRefused: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do: "Change the value in the StorageClass or the claim; the message quotes the " +
			"rack.",
		Next: showClass,
	},
	csierr.Conflict: {
		Link:     LinkDisk,
		ByItself: repeated,
		Do:       "Check the object on the rack; the message quotes the rack.",
		Next:     showDisk,
	},
	csierr.RackFull: {
		Link:     LinkRack,
		ByItself: "The orchestrator repeats the call, which succeeds when there is room.",
		Do: "Delete unneeded disks and snapshots, or have the quota raised; an audit lists " +
			"orphans.",
		Next: "oxide-csi-plugin audit --kubectl",
	},
	csierr.RackUnavailable: {
		Link:     LinkRack,
		ByItself: passes,
		Do: "Nothing if it passes; otherwise check OXIDE_HOST, the network and the " +
			"certificate.",
		Next: checkRack,
	},
	csierr.EffectUnknown: {
		Link:     LinkRack,
		ByItself: "The orchestrator repeats the call, which finds what was done.",
		Do:       "Nothing; if the error persists, follow its message.",
		Next:     checkRack,
	},
	csierr.RackUnknown: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Correct the address in OXIDE_HOST, or update the rack.",
		Next:     checkRack,
	},
	csierr.RackError: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Give the rack's operator the request id in the message.",
		Next:     controllerLog,
	},
	csierr.RackResponseInvalid: {
		Link:     LinkRack,
		ByItself: repeated,
		Do: "Report it with the log; a server between driver and rack may answer in the " +
			"rack's place.",
		Next: controllerLog,
	},
	csierr.DeadlineExceeded: {
		ByItself: goesOn,
		Do:       "Nothing; the call is repeated.",
		Next:     showPods,
	},
	csierr.Canceled: {
		ByItself: "The orchestrator repeats the call if it still needs it.",
		Do:       "Nothing.",
		Next:     showPods,
	},
}
