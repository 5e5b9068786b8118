package volume

import (
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The attributes of a mount, with the values of mount_setattr(2).
const (
	AttrReadOnly    = 0x1
	attrNoSUID      = 0x2
	attrNoDev       = 0x4
	attrNoExec      = 0x8
	attrNoAtime     = 0x10
	attrStrictAtime = 0x20
	AttrAtimeMask   = 0x70
	attrNoDirAtime  = 0x80
	attrNoSymFollow = 0x200000
)

// MountOptions are mount flags, separated into those of the mount and those of the filesystem.
type MountOptions struct {
	Attr uint64 // of the mount
	// AtimeChosen reports whether a flag sets how access times are updated.
	AtimeChosen bool
	Super       []string // flags that every filesystem knows: ro, sync, dirsync, lazytime
	Data        []MountOption
	// Given reports whether the request has flags. They may be sensitive, so text that may quote them,
	// such as the kernel's messages, must not be shown.
	Given bool
}

// MountOption is an option of the filesystem.
type MountOption struct {
	Key, Value string
	HasValue   bool
	// Flag is the position of the mount flag that has the option, from 1; 0 for an option of the
	// driver's own.
	Flag int
}

// attrFlags are the flags of the mount itself: the attributes that they set and clear.
var attrFlags = map[string]struct{ set, clear uint64 }{
	"rw": {0, AttrReadOnly}, "ro": {AttrReadOnly, 0},
	"suid": {0, attrNoSUID}, "nosuid": {attrNoSUID, 0},
	"dev": {0, attrNoDev}, "nodev": {attrNoDev, 0},
	"exec": {0, attrNoExec}, "noexec": {attrNoExec, 0},
	"atime": {0, attrNoAtime}, "noatime": {attrNoAtime, AttrAtimeMask},
	"relatime": {0, AttrAtimeMask}, "norelatime": {0, 0},
	"strictatime": {attrStrictAtime, AttrAtimeMask}, "nostrictatime": {0, attrStrictAtime},
	"diratime": {0, attrNoDirAtime}, "nodiratime": {attrNoDirAtime, 0},
	"symfollow": {0, attrNoSymFollow}, "nosymfollow": {attrNoSymFollow, 0},
}

var (
	superFlags = []string{"sync", "async", "dirsync", "lazytime", "nolazytime"}
	// ignoredFlags are for mount(8) and init systems.
	ignoredFlags = []string{"", "defaults", "auto", "noauto", "nofail", "_netdev", "nouser"}
	// refusedFlags would do something other than mount this volume's filesystem at this path, or would
	// use another device or file.
	refusedFlags = []string{
		"bind", "rbind", "remount", "move", "loop", "offset", "sizelimit", "helper", "source", "subdir",
		"user", "users", "owner", "group", "shared", "rshared", "private", "rprivate", "slave", "rslave",
		"unbindable", "runbindable", "device", "journal_dev", "journal_path", "logdev", "rtdev",
	}
)

// ParseMountFlags parses the mount flags of a volume capability. Its errors name the position of a
// flag, never the flag.
func ParseMountFlags(flags []string) (MountOptions, error) {
	var o MountOptions
	for i, f := range flags {
		words, ok := splitFlag(f)
		if !ok {
			return MountOptions{}, csierr.New(csierr.MountFlags, "mount flag %d has an unbalanced quote or "+
				"a NUL", i+1)
		}
		for _, word := range words {
			if !o.add(word, i+1) {
				return MountOptions{}, csierr.New(csierr.MountFlags, "mount flag %d is not for volumes: bind, "+
					"remount, move, loop, propagation and user flags, those that name another device, and values "+
					"for flags that have none, such as ro, are refused", i+1)
			}
		}
	}
	o.Given = len(flags) > 0
	if o.ReadOnly() {
		o.Super = append(o.Super, "ro")
	}
	return o, nil
}

// splitFlag splits "noatime,context=\"a,b\"" at commas outside quotes.
func splitFlag(flag string) (words []string, ok bool) {
	var word strings.Builder
	quoted := false
	for _, c := range []byte(flag) {
		switch {
		case c == 0:
			return nil, false
		case c == '"':
			quoted = !quoted
		case c == ',' && !quoted:
			words = append(words, word.String())
			word.Reset()
		default:
			word.WriteByte(c)
		}
	}
	return append(words, word.String()), !quoted
}

// add adds one flag and reports whether a volume may have it.
func (o *MountOptions) add(word string, flag int) bool {
	key, value, hasValue := strings.Cut(word, "=")
	attr, isAttr := attrFlags[word]
	switch {
	case slices.Contains(refusedFlags, key):
		return false
	case hasValue && hasNoValue(key):
		return false // the kernel treats "ro=0" as ro
	case slices.Contains(ignoredFlags, word), key == "comment", strings.HasPrefix(key, "x-"),
		strings.HasPrefix(key, "X-"):
	case isAttr:
		o.Attr = o.Attr&^attr.clear | attr.set
		o.AtimeChosen = o.AtimeChosen || (attr.set|attr.clear)&AttrAtimeMask != 0
	case slices.Contains(superFlags, word):
		o.Super = append(o.Super, word)
	default:
		o.Data = append(o.Data, MountOption{key, value, hasValue, flag})
	}
	return true
}

// hasNoValue reports whether a flag takes no value.
func hasNoValue(key string) bool {
	_, isAttr := attrFlags[key]
	return isAttr || slices.Contains(superFlags, key)
}

// ReadOnly reports whether the mount is to be read-only.
func (o MountOptions) ReadOnly() bool { return o.Attr&AttrReadOnly != 0 }

// SetReadOnly makes the filesystem and the mount read-only, whatever the flags say.
func (o *MountOptions) SetReadOnly() {
	if !o.ReadOnly() {
		o.Attr |= AttrReadOnly
		o.Super = append(o.Super, "ro")
	}
}

// AddData adds an option of the filesystem if it is missing.
func (o *MountOptions) AddData(key string) {
	if !slices.ContainsFunc(o.Data, func(d MountOption) bool { return d.Key == key }) {
		o.Data = append(o.Data, MountOption{Key: key})
	}
}

// Two mounts are equal if their filesystem is the same and they agree in the flags that mountinfo
// always shows: those of the mount, and sync, dirsync and lazytime. Other options of a filesystem
// are not compared, because mountinfo may show them in another form, or not at all.
var (
	shownMountFlags = []string{
		"ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "relatime", "nosymfollow",
	}
	shownSuperFlags = []string{"sync", "dirsync", "lazytime"}
)

// Shown returns the comparable flags that mountinfo shows for a mount with these options, sorted.
func (o MountOptions) Shown() []string {
	words := attrWords(o.Attr)
	for _, f := range shownSuperFlags {
		on, off := slices.Index(o.Super, f), -1
		switch f {
		case "sync":
			off = slices.Index(o.Super, "async")
		case "lazytime":
			off = slices.Index(o.Super, "nolazytime")
		}
		if on > off {
			words = append(words, f)
		}
	}
	slices.Sort(words)
	return words
}

// attrWords returns the words that mountinfo shows for a mount's attributes.
func attrWords(attr uint64) []string {
	var words []string
	for _, w := range []struct {
		bit  uint64
		word string
	}{
		{AttrReadOnly, "ro"}, {attrNoSUID, "nosuid"}, {attrNoDev, "nodev"}, {attrNoExec, "noexec"},
		{attrNoAtime, "noatime"}, {attrNoDirAtime, "nodiratime"}, {attrNoSymFollow, "nosymfollow"},
	} {
		if attr&w.bit != 0 {
			words = append(words, w.word)
		}
	}
	if attr&(attrNoAtime|attrStrictAtime) == 0 {
		words = append(words, "relatime")
	}
	return words
}

// ShownFlags returns the comparable flags in the two lists of a mountinfo line, sorted.
func ShownFlags(mount, super string) []string {
	var words []string
	for w := range strings.SplitSeq(mount, ",") {
		if slices.Contains(shownMountFlags, w) {
			words = append(words, w)
		}
	}
	for w := range strings.SplitSeq(super, ",") {
		if slices.Contains(shownSuperFlags, w) {
			words = append(words, w)
		}
	}
	slices.Sort(words)
	return words
}

// PublishedFlags returns the comparable flags of a publication: those of the staging mount, of
// which it is a copy, and those that the publication adds.
func PublishedFlags(staged []string, o MountOptions, readOnly bool) []string {
	words := slices.Clone(staged)
	added := attrWords(o.Attr)
	if o.AtimeChosen {
		words = slices.DeleteFunc(words, func(w string) bool { return w == "noatime" || w == "relatime" })
	} else {
		added = slices.DeleteFunc(added, func(w string) bool { return w == "relatime" })
	}
	words = append(words, added...)
	if readOnly {
		words = append(words, "ro")
	}
	slices.Sort(words)
	return slices.Compact(words)
}
