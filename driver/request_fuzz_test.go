package driver

import (
	"io"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// FuzzConfig checks that no configuration shows a value in its error, or writes more than one line.
func FuzzConfig(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		env := csitest.Pairs(strings.ReplaceAll(text, "%", canary))
		_, err := ParseConfig(nil, func(name string) string { return env[name] }, io.Discard)
		if err != nil && (strings.Contains(err.Error(), canary) ||
			strings.ContainsAny(err.Error(), "\n\r\x00")) {
			t.Fatalf("%q: the error is %q", env, err)
		}
	})
}
