// Package namespace moves this program into a mount namespace of its own. Other processes do not
// see its mounts, and the mounts disappear when the program ends or is killed.
package namespace

import "os"

// marker is the environment variable that Enter sets for the program that it starts again.
const marker = "OXIDE_NAMESPACE"

// Entered reports whether this program was started again by an Enter that has yet to return.
func Entered() bool { return os.Getenv(marker) != "" }
