package driver

import "runtime/debug"

// Release is set in release builds: -ldflags "-X <this package>.Release=v1.2.3".
var Release = ""

// clientVersion is the version of Oxide's client in this program.
func clientVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		if module.Path == "github.com/oxidecomputer/oxide.go" {
			return module.Version
		}
	}
	return ""
}

// Version returns the release, or the version of the main module from the build information.
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
