package driver

import (
	"errors"
	"net/http"

	"github.com/oxidecomputer/oxide.go/oxide"

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

// undecided reports whether an answer to a change leaves open whether the change was made: the rack
// or a proxy gave up on it, maybe behind its effect. A request that is at fault itself has none.
func undecided(err error) bool {
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) || torn(answer) || errors.Is(err, oxide.ErrInsufficientCapacity) {
		return false
	}
	code := answer.HTTPResponse.StatusCode
	return code < http.StatusBadRequest || code == http.StatusRequestTimeout ||
		code >= http.StatusInternalServerError && code != http.StatusInsufficientStorage
}
