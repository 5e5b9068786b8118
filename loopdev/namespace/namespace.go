// Package namespace moves this program into a mount namespace of its own. Other processes do not
// see its mounts, and the mounts disappear when the program ends or is killed.
package namespace

import "os"

// marker is the environment variable that Enter sets for the program that it starts again.
const marker = "OXIDE_NAMESPACE"

// Entered reports whether Enter has started this program again and has not yet returned in it.
func Entered() bool { return os.Getenv(marker) != "" }
