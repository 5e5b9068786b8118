//go:build !linux

package rack

import "time"

// sinceBoot returns the wall clock's time, because that clock also runs while the machine sleeps.
func sinceBoot() time.Duration { return time.Duration(time.Now().UnixNano()) }
