//go:build linux

package loopdev

import (
	"strings"
	"testing"
)

// FuzzLoopNumber checks that loopNumber accepts only names of whole loop devices, and that
// sysDir returns the directory of the same name.
func FuzzLoopNumber(f *testing.F) {
	f.Fuzz(func(t *testing.T, name string) {
		number, ok := loopNumber(name)
		if !ok {
			return
		}
		digits := strings.TrimPrefix(name, "loop")
		if number < 0 || strings.Trim(digits, "0123456789") != "" || digits == "" {
			t.Fatalf("%q is number %d", name, number)
		}
		// The kernel writes no leading zeros.
		if !strings.HasPrefix(digits, "0") && sysDir(number) != sysBlock+"/"+name {
			t.Fatalf("%q is in %s", name, sysDir(number))
		}
	})
}
