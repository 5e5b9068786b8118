//go:build !linux

package rack

import "time"

// sinceBoot returns the time of the wall clock, which also counts while the machine sleeps.
func sinceBoot() time.Duration { return time.Duration(time.Now().UnixNano()) }
