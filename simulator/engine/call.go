package engine

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Call is one request as the rules see it.
type Call struct {
	// Context ends when the caller has the response or gave up. It does not stop the call (A18).
	Context context.Context
	// ReadOnly marks a call that changes nothing.
	ReadOnly bool
	// Unwind makes the call fail halfway and undo what it began; Reread makes it fail when its
	// effect is there.
	Unwind, Reread bool
	// Device changes how the devices appear that the call attaches; nil changes nothing.
	Device *adminapi.DeviceFault
	// Object is set to what the call was about.
	Object store.Identity
}

// Ref names an object as a request does: by ID, or by name in a project.
type Ref struct{ Project, Object store.Selector }

// Window is the part of a list that is wanted: up to Limit items after (never at) the name or ID
// After, in the order SortBy.
type Window struct {
	SortBy string
	After  *string
	Limit  int
}

// deviceFault is how the devices appear that the call attaches.
func (c *Call) deviceFault(delay adminapi.Duration) dataplane.Fault {
	if d := c.Device; d != nil {
		return dataplane.Fault{Never: d.Never, Delay: time.Duration(max(delay, d.Delay)),
			SizeBytes: d.SizeBytes, Fails: d.Fails}
	}
	return dataplane.Fault{Delay: time.Duration(delay)}
}
