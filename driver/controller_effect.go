package driver

import (
	"errors"
	"net/http"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What may have had its effect must not end with a final code: the CO would forget the object, and
// nobody would ever delete it.

// repeated are the codes after which a CO makes the same call again. It takes any other for the
// end.
var repeated = []codes.Code{
	codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted,
}

// comeBack makes an error one after which the CO makes the call again.
func comeBack(err error) error {
	if err == nil || slices.Contains(repeated, status.Code(err)) {
		return err
	}
	return fail(codes.Unavailable, ReasonEffectUnknown, "it is not known whether the rack has done "+
		"what was asked for; repeat the call: %s", status.Convert(err).Message())
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
