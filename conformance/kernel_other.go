//go:build !linux

package conformance

import "context"

func (p preflight) askKernel(context.Context) finding {
	return fail("Run it in an instance of the rack.", "not Linux")
}
