package simulator

import (
	"errors"
	"fmt"
	"slices"
)

var phases = []Phase{Before, Instead, After, Twice, Late, Unwind, Reread}

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
func (r Rule) check() error {
	known := r.Operation == "" || slices.ContainsFunc(routes, func(op *operation) bool {
		return op.name == r.Operation
	})
	switch {
	case !known:
		return fmt.Errorf("fault rule: the rack has no operation %q; name one as the API's "+
			"operationId does, such as disk_create", r.Operation)
	case r.Phase != "" && !slices.Contains(phases, r.Phase):
		return fmt.Errorf("fault rule: there is no phase %q; use one of %q", r.Phase, phases)
	case !r.effective():
		return errors.New("fault rule: it does nothing; give it an answer, cut, hang, delay, " +
			"slow_body, slow_byte, torn_body, drop_fields or device")
	case r.Probability < 0 || r.Probability > 1:
		return fmt.Errorf("fault rule: the probability is %g; give one from 0 to 1",
			r.Probability)
	case r.Skip < 0 || r.Times < 0 || r.TornBody < 0:
		return errors.New("fault rule: skip, times and torn_body cannot be negative")
	}
	if err := r.checkAnswer(); err != nil {
		return err
	}
	return r.checkPlace()
}

func (r Rule) effective() bool {
	return r.ends() || r.Delay > 0 || r.SlowBody > 0 || r.SlowByte > 0 || r.TornBody > 0 ||
		len(r.DropFields) > 0 || r.Device != nil ||
		slices.Contains([]Phase{Twice, Unwind, Reread}, r.Phase)
}

// ends says whether the rule gives the caller an end of its own.
func (r Rule) ends() bool { return r.Answer != nil || r.Cut || r.Hang > 0 }

func (r Rule) checkAnswer() error {
	switch a := r.Answer; {
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
func (r Rule) checkPlace() error {
	elsewhere := func(operations []string) bool {
		return r.Operation != "" && !slices.Contains(operations, r.Operation)
	}
	switch {
	case r.Phase == Unwind && elsewhere(unwinding):
		return fmt.Errorf("fault rule: %s cannot fail in the middle; unwind is for %q",
			r.Operation, unwinding)
	case r.Phase == Reread && elsewhere(rereading):
		return fmt.Errorf("fault rule: %s does not read a disk again; reread is for %q",
			r.Operation, rereading)
	case r.Device != nil && elsewhere(plugging):
		return fmt.Errorf("fault rule: %s shows no device to a guest; device is for %q",
			r.Operation, plugging)
	case r.Phase == Late && !r.ends():
		return errors.New("fault rule: late needs what the caller gets before the effect: an " +
			"answer, cut or hang")
	}
	return nil
}
