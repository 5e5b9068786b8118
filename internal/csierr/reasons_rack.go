package csierr

import "google.golang.org/grpc/codes"

// Reasons of errors of the rack.
const (
	TokenRejected       Reason = "TokenRejected"
	TokenFileUnreadable Reason = "TokenFileUnreadable"
	RoleMissing         Reason = "RoleMissing"
	ProjectNotFound     Reason = "ProjectNotFound"
	ProjectChanged      Reason = "ProjectChanged"
	ObjectNotFound      Reason = "ObjectNotFound"
	NameTaken           Reason = "NameTaken"
	ValueRefused        Reason = "ValueRefused"
	Conflict            Reason = "Conflict"
	RackFull            Reason = "RackFull"
	RackUnavailable     Reason = "RackUnavailable"
	EffectUnknown       Reason = "EffectUnknown"
	LookTooOld          Reason = "LookTooOld"
	RackUnknown         Reason = "RackUnknown"
	RackError           Reason = "RackError"
	RackResponseInvalid Reason = "RackResponseInvalid"
	DeadlineExceeded    Reason = "DeadlineExceeded"
	Canceled            Reason = "Canceled"
)

var rackReasons = section{
	title: "Errors of the rack",
	reasons: []Explanation{
		{
			Reason: TokenRejected, Code: codes.Unauthenticated,
			Also:  "; at Probe, `FAILED_PRECONDITION`",
			Means: "The rack does not accept the token. It may have expired.",
			Do:    "Put a new token into the Secret; the driver reads it without a restart.",
		},
		{
			Reason: TokenFileUnreadable, Code: codes.FailedPrecondition,
			Also: ", only at Probe",
			Means: "The token file (`OXIDE_TOKEN_FILE`) is gone, contains no token, or blocks its " +
				"reader, such as a FIFO or a mount that hangs. Calls continue with the token read " +
				"last, until the rack refuses it.",
			Do: "Restore the file, or repair its mount; the driver reads it without a restart. A " +
				"driver that is started while the file cannot be read ends at once.",
		},
		{
			Reason: RoleMissing, Code: codes.PermissionDenied,
			Also:  "; at Probe, `FAILED_PRECONDITION`",
			Means: "The token's user lacks a role on the project.",
			Do:    "Give the token's user the role limited-collaborator on the project.",
		},
		{
			Reason: ProjectNotFound, Code: codes.FailedPrecondition,
			Also:  "; at a call, `NOT_FOUND` or `PERMISSION_DENIED`",
			Means: "`OXIDE_PROJECT` names no project that the token may see.",
			Do:    "Correct `OXIDE_PROJECT`, or give the token's user a role on the project.",
		},
		{
			Reason: ProjectChanged, Code: codes.FailedPrecondition,
			Means: "`OXIDE_PROJECT` or `OXIDE_HOST` leads to another project or silo than when the " +
				"controller started: somebody renamed the project and made another one of its name, or " +
				"the address is another rack's. The driver changes nothing until it finds its own again.",
			Do: "Set `OXIDE_PROJECT` to the project's id, which no other project can get, and check " +
				"`OXIDE_HOST`.",
		},
		{
			Reason: ObjectNotFound, Code: codes.NotFound,
			Means: "The rack does not know an object of the call.",
			Do:    "Check whether somebody deleted the object.",
		},
		{
			Reason: NameTaken, Code: codes.AlreadyExists,
			Means: "The rack has an object of that name already.",
			Do:    "Find the object with the name on the rack.",
		},
		{
			Reason: ValueRefused, Code: codes.OutOfRange,
			Also:  " or `INVALID_ARGUMENT`",
			Means: "The rack does not accept a value; the message quotes the rack.",
			Do:    "Change the value in the StorageClass or the claim.",
		},
		{
			Reason: Conflict, Code: codes.FailedPrecondition,
			Means: "The rack refuses the call in the object's current state; the message quotes " +
				"the rack.",
			Do: "Check the object on the rack.",
		},
		{
			Reason: RackFull, Code: codes.ResourceExhausted,
			Means: "The silo's quota or the rack's space is used up.",
			Do: "Delete unneeded disks and snapshots (`oxide-csi-plugin audit` lists orphans), or " +
				"have the quota raised.",
		},
		{
			Reason: RackUnavailable, Code: codes.Unavailable,
			Means: "The rack cannot be reached, or cannot answer now.",
			Do: "Nothing if it passes; otherwise check `OXIDE_HOST`, the network and the " +
				"certificate.",
		},
		{
			Reason: EffectUnknown, Code: codes.Unavailable,
			Means: "The rack itself has not answered whether a disk or a snapshot was made or deleted, " +
				"or a disk attached or detached, and may still do so. For a minute " +
				"(`OXIDE_LATE_LIMIT`) the driver reports nothing as done that this could undo.",
			Do: "Nothing; the call is repeated, and finds what was done. If the error persists, " +
				"follow its message.",
		},
		{
			Reason: LookTooOld, Code: codes.Aborted,
			Means: "Between the look at the rack and the change that it allows passed more time than " +
				"`OXIDE_LOOK_LIMIT`: the process or its machine stood still, or the rack is slow. The " +
				"change was not requested, because the state may be another one by now.",
			Do: "Nothing; the call is repeated. If it persists, find out why the rack's answers take " +
				"seconds.",
		},
		{
			Reason: RackUnknown, Code: codes.Unavailable,
			Means: "The server at `OXIDE_HOST` is not a rack of release v20 or later.",
			Do:    "Correct the address in `OXIDE_HOST`, or update the rack.",
		},
		{
			Reason: RackError, Code: codes.Internal,
			Means: "The rack failed.",
			Do:    "Give the rack's operator the request id in the message.",
		},
		{
			Reason: RackResponseInvalid, Code: codes.Unavailable,
			Means: "The rack's response is invalid or contradicts the call.",
			Do: "Report it with the log; a server between driver and rack may answer in the " +
				"rack's place.",
		},
		{
			Reason: DeadlineExceeded, Code: codes.DeadlineExceeded,
			Means: "The deadline passed before the rack or the node had an answer.",
			Do:    "Nothing; the call is repeated and continues where this one stopped.",
		},
		{
			Reason: Canceled, Code: codes.Canceled,
			Means: "The caller canceled the call.",
			Do:    "Nothing.",
		},
	},
}
