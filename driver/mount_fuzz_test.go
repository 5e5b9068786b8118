//go:build linux

package driver

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// FuzzMountTable holds that a table of any content is read or refused, that the mounts at a path
// are those that the table has there, all of them, and that the one seen has no other on top.
func FuzzMountTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		table, err := parseMountTable(b)
		if err != nil {
			return
		}
		layers, there := table.at(path), 0
		for _, m := range table {
			if m.Mountpoint == path {
				there++
			}
		}
		if len(layers) != there {
			t.Fatalf("%d mounts at %q, found %d", there, path, len(layers))
		}
		var free []int // those that no other lies on
		for _, m := range layers {
			if m.Mountpoint != path {
				t.Fatalf("at(%q) has one at %q", path, m.Mountpoint)
			}
			covered := false
			for _, other := range layers {
				covered = covered || other.Parent == m.ID && other.ID != m.ID
			}
			if !covered {
				free = append(free, m.ID)
			}
		}
		top := table.top(path)
		if (top == nil) != (there == 0) {
			t.Fatalf("top(%q) = %v of %d", path, top, there)
		}
		if len(free) > 0 && !slices.Contains(free, top.ID) {
			t.Fatalf("top(%q) has another mount on top", path)
		}
	})
}

// FuzzHeldStaysHeld holds that one more line in the mount table never makes a volume free that was
// held, nor a path empty that was not.
func FuzzHeldStaysHeld(f *testing.F) {
	f.Fuzz(func(t *testing.T, b, line []byte, major, minor uint32) {
		before, err := parseMountTable(b)
		if err != nil {
			return
		}
		after, err := parseMountTable(slices.Concat(b, []byte("\n"), line, []byte("\n")))
		if err != nil || len(after) < len(before) {
			return // the line tore another one apart
		}
		d := device{Path: "/nowhere/nvme9n1", Major: major, Minor: minor}
		if was, is := len(before.of(d)), len(after.of(d)); is < was {
			t.Fatalf("with %q the device has %d mounts, not %d", line, is, was)
		}
		for _, m := range before {
			if after.top(m.Mountpoint) == nil {
				t.Fatalf("with %q nothing is mounted at %q", line, m.Mountpoint)
			}
			if before.onlyAt(m.Mountpoint, m, d) != nil && after.onlyAt(m.Mountpoint, m, d) == nil {
				t.Fatalf("with %q the mount at %q is the only one", line, m.Mountpoint)
			}
		}
	})
}

// FuzzMountFlags holds that no flag is quoted in an error, that none that is refused gets through
// in whatever company, and that what sets a mount are the known attributes only.
func FuzzMountFlags(f *testing.F) {
	known := uint64(attrReadOnly | attrNoSUID | attrNoDev | attrNoExec | attrAtimeMask |
		attrNoDirAtime | attrNoSymFollow)
	f.Fuzz(func(t *testing.T, first, second string) {
		o, err := parseMountFlags([]string{first, second})
		if err != nil {
			if again, ok := refusedText(first, second); !ok || again != err.Error() {
				t.Fatalf("the error says more than which flag it is: %v", err)
			}
			return
		}
		if o.Attr&^known != 0 {
			t.Fatalf("%q and %q set the attributes %#x", first, second, o.Attr)
		}
		for _, word := range o.Super {
			if word != "ro" && !slices.Contains(superFlags, word) {
				t.Fatalf("%q and %q give every filesystem %q", first, second, word)
			}
		}
		for _, d := range o.Data {
			if slices.Contains(refusedFlags, d.Key) || strings.ContainsRune(d.Key+d.Value, 0) ||
				strings.ContainsAny(d.Key, "\"=") {
				t.Fatalf("%q and %q let %+v through", first, second, d)
			}
		}
		o.setReadOnly()
		if !slices.Contains(o.Super, "ro") || !slices.Contains(o.shown(), "ro") {
			t.Fatalf("%q and %q cannot be made read-only: %+v", first, second, o)
		}
	})
}

// refusedText is what is said of the same flags with every letter of them replaced by the number
// of the flag, which is all an error may show.
func refusedText(flags ...string) (string, bool) {
	for i := range flags {
		alone := make([]string, i+1)
		alone[i] = flags[i]
		if _, err := parseMountFlags(alone); err != nil {
			for _, stand := range []string{"bind", `"`} {
				alone[i] = stand
				_, same := parseMountFlags(alone)
				if same != nil && same.Error() == err.Error() {
					return same.Error(), true
				}
			}
			return "", false
		}
	}
	return "", false
}

// FuzzMkfsOptions holds that what is accepted has a canonical form that means the same, and that no
// argument is one that could overwrite a finding or name a file.
func FuzzMkfsOptions(f *testing.F) {
	options := []string{"-i", "-I", "-b", "-m", "-n", "-L"}
	value := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._=-]*$`)
	f.Fuzz(func(t *testing.T, text string) {
		o, err := parseMkfsOptions(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		again, err := parseMkfsOptions(o.String())
		if err != nil || again.String() != o.String() {
			t.Fatalf("%q becomes %q, then %q, %v", text, o, again, err)
		}
		for _, fsType := range supportedFilesystems {
			args := o.args(fsType)
			for i, arg := range args {
				if i%2 == 0 && !slices.Contains(options, arg) || i%2 == 1 && !value.MatchString(arg) {
					t.Fatalf("%q gives %s the arguments %q", text, fsType, args)
				}
			}
			if len(args)%2 != 0 || (o.check(fsType) == nil && len(args) != 2*len(o.chosen)) {
				t.Fatalf("%q is fine for %s, but gives %q", text, fsType, args)
			}
		}
	})
}
