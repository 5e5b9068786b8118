package rules

import (
	"fmt"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// invalidRequest is a refusal of what the caller asks for in this situation.
func invalidRequest(format string, args ...any) Refused {
	return Refused{400, "InvalidRequest", fmt.Sprintf(format, args...)}
}

// invalidValue is a refusal of a value, wherever it is asked for.
func invalidValue(label, problem string) Refused {
	return Refused{400, "InvalidValue", fmt.Sprintf("unsupported value for %q: %s", label, problem)}
}

// inConflict is a refusal for the state of the object.
func inConflict(message string) Refused { return Refused{409, "Conflict", message} }

// notFound is for what no object of this kind has: an "id" or a "name".
func notFound(kind, by, what string) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with %s %q", kind, by, what)}
}

// unknownID is for an ID that no object of this kind has.
func unknownID(kind, id string) Refused { return notFound(kind, "id", id) }

// unknownName is for a name that no object of this kind has.
func unknownName(kind string, name oxide.Name) Refused {
	return notFound(kind, "name", string(name))
}

// nameTaken is for a name that another object of this kind has.
func nameTaken(kind string, name oxide.Name) Refused {
	return Refused{400, "ObjectAlreadyExists", fmt.Sprintf("already exists: %s %q", kind, name)}
}

var (
	internalError = Refused{500, "Internal", "Internal Server Error"}
	unavailable   = Refused{503, "ServiceNotAvailable", "Service Unavailable"}
	quotaExceeded = Refused{507, "InsufficientCapacity", "Insufficient capacity: Storage Limit " +
		"Exceeded: Not enough storage to complete request. Either remove unneeded disks and " +
		"snapshots to free up resources or contact the rack operator to request a capacity increase."}
)
