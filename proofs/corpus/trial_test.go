//go:build linux

package corpus_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// trial is a disk, with a request and the wanted outcome. A generator sets the fields.
type trial struct {
	Name string
	// Size is the size of the disk, and BlockSize the size of its logical blocks.
	Size      int64
	BlockSize int
	// FS is the filesystem that the request asks for.
	FS string
	// History is the controller's report of the origin and the use of the disk.
	History map[string]string
	// Rand is the trial's own source of random numbers. It depends only on the seed and the name.
	Rand *rand.Rand
	// Fill writes the content of the disk.
	Fill func(*image)
	// Until is the offset up to which a refused disk must keep its bytes; 0 means its end. Behind it
	// the kernel writes, or the driver its records of a growth.
	Until int64
	// Set, if it is set, makes further changes after the disk was attached to the guest.
	Set func(*fixture)
	// Check, if it is set, is a further check of the result.
	Check func(*fixture) error
	Want  want
}

// outcome is the effect of a call on a disk.
type outcome string

const (
	formatted outcome = "formatted"
	mounted   outcome = "mounted"
	refused   outcome = "refused"
	// either wants a disk mounted, or refused with one of the names.
	either outcome = "mounted or refused"
)

// want is the outcome that is wanted.
type want struct {
	Outcome outcome
	// Reasons are the allowed reasons of a refusal.
	Reasons []string
	// Names contains words of which the evidence must contain one, unless it names an offset at which
	// the disk is not zero.
	Names []string
	// Says contains words that the evidence must contain.
	Says []string
	// Begun is set if a format may have begun before the refusal, because the disk was blank.
	Begun bool
	// Code is the code of the answer. Empty means FAILED_PRECONDITION.
	Code string
}

// The reasons of refusals in these trials.
const (
	notBlank    = "DiskNotBlank"
	unreadable  = "DeviceUnreadable"
	tooLarge    = "FilesystemTooLarge"
	wrongSize   = "DeviceWrongSize"
	held        = "DeviceHeld"
	readOnly    = "DeviceReadOnly"
	notUnique   = "DeviceNotUnique"
	changed     = "DeviceChanged"
	notFound    = "DeviceNotFound"
	sizeMissing = "DiskSizeUnknown"
	toolFailed  = "NodeToolFailed"

	wrongFilesystem = "WrongFilesystem"
	feature         = "FilesystemFeature"
)

func refuse(reasons ...string) want { return want{Outcome: refused, Reasons: reasons} }

// foreign wants a refusal because the disk is not blank. The evidence must contain one of the
// names, or an offset.
func foreign(names ...string) want {
	return want{Outcome: refused, Reasons: []string{notBlank}, Names: names}
}

var (
	isFormatted = want{Outcome: formatted}
	isMounted   = want{Outcome: mounted}
)

// generator sets the fields of a trial that differ from the defaults: a small disk, for an ext4.
type generator struct {
	name string
	make func(t *trial)
}

// blank returns a trial of a blank disk that set changes.
func blank(name, fs string, w want, set func(*fixture)) generator {
	return generator{name, func(t *trial) { t.FS, t.Want, t.Set = fs, w, set }}
}

// with returns a trial of a disk with the filesystem of a kind. If they are not nil, change writes
// more to the disk before it is attached, and set changes it then.
func with(name, kind string, w want, change func(*image), set func(*fixture)) generator {
	return generator{name, func(t *trial) {
		k := kindOf(kind)
		k.of(t)
		if change != nil {
			t.Fill = func(im *image) {
				im.filesystem(k)
				change(im)
			}
		}
		t.Want, t.Set = w, set
	}}
}

// and returns the generator with further settings.
func (g generator) and(more func(*trial)) generator {
	return generator{g.name, func(t *trial) {
		g.make(t)
		more(t)
	}}
}

// larger returns the generator with a disk that is larger than its filesystem.
func (g generator) larger() generator { return g.and(func(t *trial) { t.Size += fsBytes }) }

func corpus() []generator {
	return slices.Concat(blanks(), filesystems(), tables(), headers(), noise(),
		situations(), races(), formats(), regions(),
		owners(), oddities(), identities(), grown(), tails(), descriptors(),
		foreignParts(), forged(), forgedRecords())
}

// smallest is the size from which on mke2fs uses its default options. Disks are not much larger,
// because the driver reads many of them whole.
const smallest = 512 * mib

// defaults returns the values that most trials have.
func defaults(name string, r *rand.Rand) *trial {
	return &trial{
		Name: name, Rand: r, Size: smallest + 64*mib*r.Int64N(4), BlockSize: 512, FS: ext4,
		History: made, Fill: func(*image) {},
	}
}

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
)

// ours contains the filesystems of volumes.
var ours = []string{ext3, ext4, xfs, btrfs}

// each returns n generators that differ only in their random numbers. A single one has no number.
func each(n int, name string, make func(t *trial)) []generator {
	if n == 1 {
		return []generator{{name, make}}
	}
	var all []generator
	for i := range n {
		all = append(all, generator{fmt.Sprintf("%s %d", name, i+1), make})
	}
	return all
}
