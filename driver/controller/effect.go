package controller

import (
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// A call that may have had its effect must not end with a final code: the CO would forget the
// object, and nobody would ever delete it.

// retryLater converts an error to one after which the CO repeats the call.
func retryLater(err error) error {
	if err == nil || csierr.Retryable(err) {
		return err
	}
	return csierr.New(csierr.EffectUnknown, "the rack may or may not have made the change; repeat "+
		"the call: %s", csierr.Message(err))
}
