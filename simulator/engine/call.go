package engine

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Call has the parts of one request that the rules need.
type Call struct {
	// Context ends when the caller has the response or has given up. Its end does not stop the call
	// (A18).
	Context context.Context
	// ReadOnly marks a call that changes nothing.
	ReadOnly bool
	// Unwind makes the call fail halfway and undo its changes. Reread makes it fail after it has
	// taken effect.
	Unwind, Reread bool
	// Resumed marks a call of an earlier simulator that a restart completes (A19).
	Resumed bool
	// Device is the fault of the devices that the call attaches; nil means no fault.
	Device *adminapi.DeviceFault
	// Cascade permits a deletion together with the objects that depend on it.
	Cascade bool
	// Object is set to the object of the call.
	Object store.Identity
}

// Ref names an object in the form of a request: by ID, or by name in a project.
type Ref struct{ Project, Object store.Selector }

// Window is the requested part of a list: up to Limit items behind (never at) the name or ID
// After, in the order SortBy.
type Window struct {
	SortBy string
	After  *string
	Limit  int
}

// deviceFault returns the fault of the devices that the call attaches, with the delay of the
// switches.
func (c *Call) deviceFault(delay adminapi.Duration) dataplane.Fault {
	if d := c.Device; d != nil {
		return dataplane.Fault{Never: d.Never, Delay: time.Duration(max(delay, d.Delay)),
			SizeBytes: int64(d.SizeBytes), Fails: d.Fails}
	}
	return dataplane.Fault{Delay: time.Duration(delay)}
}
