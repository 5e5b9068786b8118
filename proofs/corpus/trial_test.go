//go:build linux

package corpus_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// trial is one disk, with a request and the outcome that is wanted. A generator fills in the
// fields.
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
	// Until is the offset up to which a disk that is refused must keep its bytes. Behind it the
	// kernel writes, or the driver its records of a growth. With 0, it is the disk's end.
	Until int64
	// Set arranges everything else, after the disk was attached to the guest.
	Set func(*fixture) error
	// Check checks the result, in addition to the rules for every trial.
	Check func(*fixture) error
	Want  want
}

// outcome is the effect of a call on a disk.
type outcome string

const (
	formatted outcome = "formatted"
	mounted   outcome = "mounted"
	refused   outcome = "refused"
)

// want is the outcome that is wanted.
type want struct {
	Outcome outcome
	// Reasons are the allowed reasons of a refusal.
	Reasons []string
	// Names are words of which the evidence must contain one, unless it names a true place. If
	// there is no place to name (NoPlace), a word is required.
	Names   []string
	NoPlace bool
	// Says are words that the evidence must contain, all of them.
	Says []string
	// Begun allows a refusal because of the result of a format that began correctly: the disk was
	// blank then.
	Begun bool
	// Code is the code of the answer. Empty means FAILED_PRECONDITION.
	Code string
}

// The reasons with which the driver must refuse in these trials.
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

// refuse wants a refusal with one of the reasons.
func refuse(reasons ...string) want { return want{Outcome: refused, Reasons: reasons} }

// foreign wants a refusal because the disk holds data. The evidence must contain one of the
// names, or the place.
func foreign(names ...string) want {
	return want{Outcome: refused, Reasons: []string{notBlank}, Names: names}
}

// generator makes a trial. For fields that it does not set there are defaults: a small
// disk, ext4.
type generator struct {
	name string
	make func(t *trial)
}

// corpus returns all generators, in the order of the families.
func corpus() []generator {
	return slices.Concat(blanks(), filesystems(), tables(), headers(), noise(),
		situations(), races(), formats(), regions(),
		owners(), oddities(), identities(), grown(), tails(), descriptors(),
		foreignParts(), forged(), forgedRecords())
}

// smallest is the size from which on mke2fs makes an ordinary filesystem. Disks are not much
// larger, because the driver reads many of them whole.
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

// each returns a generator n times, with different random numbers.
func each(n int, name string, make func(t *trial)) []generator {
	var all []generator
	for i := range n {
		all = append(all, generator{fmt.Sprintf("%s %d", name, i+1), make})
	}
	return all
}
