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

// unknownID is for an ID that no object of this kind has.
func unknownID(kind, id string) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with id %q", kind, id)}
}

// unknownName is for a name that no object of this kind has.
func unknownName(kind string, name oxide.Name) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with name %q", kind, name)}
}

// nameTaken is for a name that another object of this kind has.
func nameTaken(kind string, name oxide.Name) Refused {
	return Refused{400, "ObjectAlreadyExists", fmt.Sprintf("already exists: %s %q", kind, name)}
}
