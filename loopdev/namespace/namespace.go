// Package namespace moves this program into a mount namespace of its own: nobody else sees what it
// mounts, and what it leaves mounted is gone with it, however it ends.
package namespace

import "os"

// marker is set for the program that Enter has started again.
const marker = "OXIDE_NAMESPACE"

// Entered reports whether Enter has started this program, and has not returned yet.
func Entered() bool { return os.Getenv(marker) != "" }
