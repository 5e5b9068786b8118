package controller

import (
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// What may have had its effect must not end with a final code: the CO would forget the object, and
// nobody would ever delete it.

// comeBack makes an error one after which the CO makes the call again.
func comeBack(err error) error {
	if err == nil || csierr.Retryable(err) {
		return err
	}
	return csierr.New(csierr.EffectUnknown, "it is not known whether the rack has done "+
		"what was asked for; repeat the call: %s", csierr.Message(err))
}
