//go:build !linux

package rack

import "time"

// sinceBoot returns the wall clock's time: that clock also runs while the machine sleeps.
func sinceBoot() time.Duration { return time.Duration(time.Now().UnixNano()) }
