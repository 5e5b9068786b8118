package simulator

import (
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var phases = []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After, adminapi.Twice,
	adminapi.Deferred, adminapi.Unwind, adminapi.Reread}

// The operations in which the rack can fail in the middle, those that read a disk again for their
// answer, and those that show devices to a guest.
var (
	unwinding = []string{"disk_create", "disk_delete", "instance_create", "snapshot_create"}
	rereading = []string{"instance_disk_attach", "instance_disk_detach"}
	plugging  = []string{
		"instance_create", "instance_disk_attach", "instance_reboot", "instance_start",
	}
)

// mostPadding is as much as an answer can be padded with.
const mostPadding = 1 << 30

// check refuses a rule that can never strike or has no effect, which is a mistake in a test.
func checkFault(r adminapi.Fault) error {
	known := r.Operation == "" || slices.ContainsFunc(routes, func(op *operation) bool {
		return op.name == r.Operation
	})
	switch {
	case !known:
		return fmt.Errorf("fault rule: the rack has no operation %q; name one as the API's "+
			"operationId does, such as disk_create", r.Operation)
	case r.Phase != "" && !slices.Contains(phases, r.Phase):
		return fmt.Errorf("fault rule: there is no phase %q; use one of %q", r.Phase, phases)
	case !effective(r):
		return errors.New("fault rule: it does nothing; give it an answer, cut, hang, delay, " +
			"slow_body, slow_byte, truncate_body, drop_fields or device")
	case r.Probability < 0 || r.Probability > 1:
		return fmt.Errorf("fault rule: the probability is %g; give one from 0 to 1",
			r.Probability)
	case r.Skip < 0 || r.Times < 0 || r.TruncateBody < 0:
		return errors.New("fault rule: skip, times and truncate_body cannot be negative")
	}
	if err := checkResponse(r); err != nil {
		return err
	}
	return checkPlace(r)
}

func effective(r adminapi.Fault) bool {
	return ends(r) || r.Delay > 0 || r.SlowBody > 0 || r.SlowByte > 0 || r.TruncateBody > 0 ||
		len(r.DropFields) > 0 || r.Device != nil ||
		slices.Contains([]adminapi.Phase{adminapi.Twice, adminapi.Unwind, adminapi.Reread}, r.Phase)
}

// ends says whether the rule gives the caller an end of its own.
func ends(r adminapi.Fault) bool { return r.Response != nil || r.Cut || r.Hang > 0 }

func checkResponse(r adminapi.Fault) error {
	switch a := r.Response; {
	case a == nil:
		return nil
	case a.Status < 200 || a.Status > 599:
		return fmt.Errorf("fault rule: the answer's status is %d; give one from 200 to 599",
			a.Status)
	case a.PadBytes < 0 || a.PadBytes > mostPadding:
		return fmt.Errorf("fault rule: pad_bytes is %d; give at most %d", a.PadBytes, mostPadding)
	}
	return nil
}

// checkPlace refuses what does nothing at that operation or in that phase.
func checkPlace(r adminapi.Fault) error {
	elsewhere := func(operations []string) bool {
		return r.Operation != "" && !slices.Contains(operations, r.Operation)
	}
	switch {
	case r.Phase == adminapi.Unwind && elsewhere(unwinding):
		return fmt.Errorf("fault rule: %s cannot fail in the middle; unwind is for %q",
			r.Operation, unwinding)
	case r.Phase == adminapi.Reread && elsewhere(rereading):
		return fmt.Errorf("fault rule: %s does not read a disk again; reread is for %q",
			r.Operation, rereading)
	case r.Device != nil && elsewhere(plugging):
		return fmt.Errorf("fault rule: %s shows no device to a guest; device is for %q",
			r.Operation, plugging)
	case r.Phase == adminapi.Deferred && !ends(r):
		return errors.New("fault rule: deferred needs what the caller gets before the effect: an " +
			"answer, cut or hang")
	}
	return nil
}
