package adminapi

import (
	"fmt"
	"slices"
	"strings"
)

// Hotplug describes what the rack does with the disks of running instances: one of the modes
// HotplugFull, HotplugAttachOnly and HotplugNone, followed by any of the behaviours of the open
// prototype, separated by commas. "attach-only,record-first" is an example.
type Hotplug string

// These are the modes.
const (
	// HotplugFull attaches and detaches disks while the instance runs.
	HotplugFull Hotplug = "full"
	// HotplugAttachOnly attaches disks while the instance runs, and detaches them only while it is
	// stopped.
	HotplugAttachOnly Hotplug = "attach-only"
	// HotplugNone needs a stopped instance for both, as racks do today (A17).
	HotplugNone Hotplug = "none"
)

// These are the behaviours.
const (
	// RecordFirst records an attach before the instance gets the device. If that fails, as with the
	// device fault "fails", the answer is a 500 and the disk stays attached without a device. A
	// repeated attach asks the instance again.
	RecordFirst Hotplug = "record-first"
	// RefusalsAs500 answers every refused attach with a 500 that names no reason. What is not found
	// is still a 404.
	RefusalsAs500 Hotplug = "refusals-500"
	// SurpriseRemoval lets a running guest use a disk for one more second after the detach was
	// requested, and then removes the disk under it.
	SurpriseRemoval Hotplug = "surprise-removal"
)

// hotplugNeeds has the modes with which each behaviour makes sense.
var hotplugNeeds = map[Hotplug][]Hotplug{
	RecordFirst:     {HotplugFull, HotplugAttachOnly},
	RefusalsAs500:   {HotplugFull, HotplugAttachOnly},
	SurpriseRemoval: {HotplugFull},
}

// With adds behaviours to a mode.
func (h Hotplug) With(behaviours ...Hotplug) Hotplug {
	for _, b := range behaviours {
		h += "," + b
	}
	return h
}

// Has reports whether a mode or a behaviour is in effect.
func (h Hotplug) Has(word Hotplug) bool { return slices.Contains(h.words(), word) }

// Attaches and Detaches report whether the rack does that while the instance runs.
func (h Hotplug) Attaches() bool { return !h.Has(HotplugNone) }

// Detaches is described at Attaches.
func (h Hotplug) Detaches() bool { return h.Has(HotplugFull) }

func (h Hotplug) words() (words []Hotplug) {
	for word := range strings.SplitSeq(string(h), ",") {
		words = append(words, Hotplug(word))
	}
	return words
}

// Check returns an error unless the words are a mode and behaviours that it can have.
func (h Hotplug) Check() error {
	words := h.words()
	mode := words[0]
	if !slices.Contains([]Hotplug{HotplugFull, HotplugAttachOnly, HotplugNone}, mode) {
		return fmt.Errorf("hotplug is %q; begin with %s, %s or %s", h, HotplugFull,
			HotplugAttachOnly, HotplugNone)
	}
	for _, word := range words[1:] {
		needs, ok := hotplugNeeds[word]
		switch {
		case !ok:
			return fmt.Errorf("hotplug has the unknown behaviour %q; use %s, %s or %s", word,
				RecordFirst, RefusalsAs500, SurpriseRemoval)
		case !slices.Contains(needs, mode):
			return fmt.Errorf("hotplug: a rack with %s cannot have %s", mode, word)
		}
	}
	return nil
}
