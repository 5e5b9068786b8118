package rules

import (
	"fmt"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// invalidRequest is the refusal of a request that is not allowed in this situation.
func invalidRequest(format string, args ...any) Refused {
	return Refused{400, "InvalidRequest", fmt.Sprintf(format, args...)}
}

// invalidValue is the refusal of a value at any place of a request.
func invalidValue(label, problem string) Refused {
	return Refused{400, "InvalidValue", fmt.Sprintf("unsupported value for %q: %s", label, problem)}
}

// inConflict is a refusal because of the object's state.
func inConflict(message string) Refused { return Refused{409, "Conflict", message} }

// notFound is the refusal of an "id" or a "name" that no object of this kind has.
func notFound(kind, by, what string) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with %s %q", kind, by, what)}
}

// unknownID is the refusal of an ID that no object of this kind has.
func unknownID(kind, id string) Refused { return notFound(kind, "id", id) }

// unknownName is the refusal of a name that no object of this kind has.
func unknownName(kind string, name oxide.Name) Refused {
	return notFound(kind, "name", string(name))
}

// nameTaken is the refusal of a name that another object of this kind has.
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
