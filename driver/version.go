package driver

import "runtime/debug"

// Release is set when a release is built: -ldflags "-X <this package>.Release=v1.2.3".
var Release = ""

// Version is the release, or what the build knows of its source.
func Version() string {
	if Release != "" {
		return Release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
