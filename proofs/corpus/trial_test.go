//go:build linux

package corpus_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// trial is one disk, what it is asked to become, and what must happen. A generator fills it.
type trial struct {
	Name string
	// Size is the disk's, and BlockSize its logical blocks'.
	Size      int64
	BlockSize int
	// FS is the filesystem that the request wants.
	FS string
	// History is what the controller tells of how the disk was made, and for what.
	History map[string]string
	// Rand is the trial's own chance: it depends on the seed and the name alone.
	Rand *rand.Rand
	// Fill writes the disk.
	Fill func(*image)
	// KernelWrites is the offset from which on the kernel writes to the disk by itself, so that only
	// what lies before shows what the driver did; 0 is nowhere.
	KernelWrites int64
	// Set arranges everything else, when the disk is in the guest already.
	Set func(*fixture) error
	// Check looks at what came out, besides the rules that hold for every trial.
	Check func(*fixture) error
	Want  want
}

// outcome is what a call did to a disk.
type outcome string

const (
	formatted outcome = "formatted"
	mounted   outcome = "mounted"
	refused   outcome = "refused"
)

// want is what must happen.
type want struct {
	Outcome outcome
	// Reasons are those of which a refusal must give one.
	Reasons []string
	// Names are words of which the evidence must have one, unless it names a true place instead.
	// Where there is no place to name they are demanded (NoPlace).
	Names   []string
	NoPlace bool
	// Says are words that the evidence must have, all of them.
	Says []string
	// Begun allows a refusal of what came out of a format that had begun in order: the disk was
	// blank then.
	Begun bool
	// Code is the answer's; empty means FAILED_PRECONDITION.
	Code string
}

// The driver's reasons that refusals here must give.
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

// refuse wants a refusal for one of the reasons.
func refuse(reasons ...string) want { return want{Outcome: refused, Reasons: reasons} }

// foreign wants a refusal because the disk holds something, by one of the names or by its place.
func foreign(names ...string) want {
	return want{Outcome: refused, Reasons: []string{notBlank}, Names: names}
}

// generator makes a trial. What it leaves open gets defaults: a disk of some GiB, ext4.
type generator struct {
	name string
	make func(t *trial)
}

// corpus are all generators, in the order of the families.
func corpus() []generator {
	return slices.Concat(blanks(), filesystems(), tables(), headers(), noise(),
		situations(), races(), formats(), regions(),
		owners(), oddities(), identities(), grown(), tails(), foreignParts(), forged(), forgedRecords())
}

// defaults are what most trials have. The rack's disks are whole GiB.
func defaults(name string, r *rand.Rand) *trial {
	return &trial{
		Name: name, Rand: r, Size: gib * (1 + r.Int64N(3)), BlockSize: 512, FS: ext4,
		History: made, Fill: func(*image) {},
	}
}

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
)

// ours are the filesystems of volumes.
var ours = []string{ext3, ext4, xfs, btrfs}

// each repeats a generator n times with another chance.
func each(n int, name string, make func(t *trial)) []generator {
	var all []generator
	for i := range n {
		all = append(all, generator{fmt.Sprintf("%s %d", name, i+1), make})
	}
	return all
}
