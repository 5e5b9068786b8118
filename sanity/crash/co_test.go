//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// patience is how long the CO repeats a call that is under way, stubbornness one that is refused,
// and callTimeout how long a call may take.
const (
	patience     = 60 * time.Second
	stubbornness = 15 * time.Second
	callTimeout  = 45 * time.Second
)

// patient is how long a CO repeats after a code.
func patient(code codes.Code) time.Duration {
	if code == codes.FailedPrecondition || code == codes.Internal {
		return stubbornness
	}
	return patience
}

// passing are the codes that may tell a CO to come again. One that stays is a failure all the same.
var passing = []codes.Code{
	codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Internal,
	codes.FailedPrecondition,
}

// once makes a step's call.
func (st step) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return st.call(ctx)
}

// repeat makes a step's call until it succeeds, and returns what the CO was told meanwhile.
func (st step) repeat(ctx context.Context) (told []string, err error) {
	start := time.Now()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := st.once(ctx)
		if err == nil {
			if st.then != nil {
				err = st.then()
			}
			return told, err
		}
		code := status.Code(err)
		told = append(told, fmt.Sprintf("%s: %s", st, status.Convert(err).Message()))
		switch {
		case !slices.Contains(passing, code):
			return told, fmt.Errorf("%s: no CO would repeat after %s", st, code)
		case time.Since(start) > patient(code):
			return told, fmt.Errorf("%s does not converge: %s after %s", st, code, patient(code))
		}
		if err := wait(ctx, pause); err != nil {
			return told, err
		}
	}
}

// walk takes steps, each until it succeeds.
func walk(ctx context.Context, steps []step) (told []string, err error) {
	for _, st := range steps {
		more, err := st.repeat(ctx)
		told = append(told, more...)
		if err != nil {
			return told, err
		}
	}
	return told, nil
}

// end forgets a life that is over, and demands that nothing of it is left.
func (l *life) end(ctx context.Context) error {
	var errs []error
	for _, v := range l.volumes {
		errs = append(errs, v.forget())
	}
	return errors.Join(append(errs, l.clean(ctx))...)
}

// inLines lists what the CO was told, and how often one after the other.
func inLines(told []string) string {
	var lines []string
	for i := 0; i < len(told); {
		times := 1
		for i+times < len(told) && told[i+times] == told[i] {
			times++
		}
		line := told[i]
		if times > 1 {
			line = fmt.Sprintf("%s (%d times)", line, times)
		}
		lines = append(lines, line)
		i += times
	}
	if len(lines) == 0 {
		return "nothing but OK"
	}
	return strings.Join(lines, "\n    ")
}
