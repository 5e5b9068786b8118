package adminapi

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Switches are the settings that can be changed while the rack runs.
type Switches struct {
	// Hotplug selects how the rack attaches disks to running instances and detaches them (A17).
	Hotplug Hotplug `json:"hotplug"`
	// DeviceDelay is the time from an attach until the device appears in the guest.
	DeviceDelay Duration `json:"device_delay"`
	// CreateHold and SnapshotHold are the minimum durations of the creation of a disk and of a
	// snapshot. A change also applies to requests in progress.
	CreateHold   Duration `json:"create_hold"`
	SnapshotHold Duration `json:"snapshot_hold"`
	// FreeDelay is the time from the deletion of a disk or a snapshot until the rack frees its space
	// and its quota; with 0 the request frees them (A68).
	FreeDelay Duration `json:"free_delay"`
	// QuotaFirst frees the quota of a deleted object at once, and its space after FreeDelay. The rack
	// has only as much space as quota, so a creation within the quota may fail meanwhile (A68).
	QuotaFirst bool `json:"quota_first"`
	// InstanceDelay is the time that an instance takes to start, stop or reboot.
	InstanceDelay Duration `json:"instance_delay"`
	QuotaBytes    Size     `json:"quota_bytes"`
	// Full makes the rack run out of physical space: it refuses every request that needs space,
	// regardless of the quota (A27).
	Full bool `json:"full"`
	// Replacing makes the rack replace a region of every disk, as after the loss of a drive. Meanwhile
	// it takes no snapshots (A39).
	Replacing bool `json:"replacing"`
	// DiskLimit is the number of disks that an instance may have.
	DiskLimit int `json:"disk_limit"`
	// Role is the role of the token's bearer in the rack's projects.
	Role string `json:"role"`
}

// The roles that the token's bearer may have in the rack's projects. A collaborator has its role in
// the whole silo, and so may create projects. A fleet administrator may also administer the pools
// of the fleet.
const (
	RoleCollaborator = "collaborator"
	RoleViewer       = "viewer"
	RoleNone         = "none"
	RoleFleetAdmin   = "fleet-admin"
)

// Duration is a time.Duration that JSON shows as "1.5s".
type Duration time.Duration

// MarshalText writes the duration as "1.5s".
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(time.Duration(d).String()), nil
}

// UnmarshalText reads a text such as "1.5s", and refuses a negative duration.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err == nil && parsed < 0 {
		err = fmt.Errorf("%s is negative", text)
	}
	*d = Duration(parsed)
	return err
}

// Hotplug is one of the modes HotplugFull, HotplugAttachOnly and HotplugNone. Behaviours of Oxide's
// hot-plug prototype (docs/hot-plug.md) may follow after commas, as in "attach-only,record-first".
type Hotplug string

const (
	// HotplugFull attaches and detaches disks while the instance runs.
	HotplugFull Hotplug = "full"
	// HotplugAttachOnly attaches disks at any time, and detaches them while the instance is stopped.
	HotplugAttachOnly Hotplug = "attach-only"
	// HotplugNone attaches and detaches only while the instance is stopped, as racks do today (A17).
	HotplugNone Hotplug = "none"
)

// The behaviours of the hot-plug prototype.
const (
	// RecordFirst records an attach before the instance gets the device. If the instance cannot get it
	// (DeviceFault.Fails), the answer is a 500, and the disk stays attached without a device. A
	// repeated attach tries again to give the device to the instance.
	RecordFirst Hotplug = "record-first"
	// RefusalsAs500 answers every refused attach with a 500 that states no reason. The answer for a
	// missing object is still a 404.
	RefusalsAs500 Hotplug = "refusals-500"
	// SurpriseRemoval lets a running guest use a disk for one second after the request to detach it,
	// and then removes the disk even if the guest still uses it.
	SurpriseRemoval Hotplug = "surprise-removal"
)

var hotplugNeeds = map[Hotplug][]Hotplug{
	RecordFirst:     {HotplugFull, HotplugAttachOnly},
	RefusalsAs500:   {HotplugFull, HotplugAttachOnly},
	SurpriseRemoval: {HotplugFull},
}

// With adds behaviours to the mode.
func (h Hotplug) With(behaviours ...Hotplug) Hotplug {
	for _, b := range behaviours {
		h += "," + b
	}
	return h
}

// Has reports whether h contains the given mode or behaviour.
func (h Hotplug) Has(word Hotplug) bool { return slices.Contains(h.words(), word) }

// Attaches reports whether the rack attaches disks while the instance runs.
func (h Hotplug) Attaches() bool { return !h.Has(HotplugNone) }

// Detaches reports whether the rack detaches disks while the instance runs.
func (h Hotplug) Detaches() bool { return h.Has(HotplugFull) }

func (h Hotplug) words() (words []Hotplug) {
	for word := range strings.SplitSeq(string(h), ",") {
		words = append(words, Hotplug(word))
	}
	return words
}

// Check returns an error if h has no known mode, or a behaviour that its mode does not allow.
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

// Size is a number of bytes. ParseSize reads it, and JSON shows it as a number.
type Size int64

var sizes = regexp.MustCompile(`^([0-9]+) ?(MiB|GiB|TiB)?$`)

// ParseSize parses a size such as 1073741824, 1GiB or 1 GiB.
func ParseSize(text string) (Size, error) {
	parts := sizes.FindStringSubmatch(text)
	if parts == nil {
		return 0, fmt.Errorf("%q is not a size; write bytes, or a number of MiB, GiB or TiB", text)
	}
	unit := map[string]int64{"": 1, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[parts[2]]
	number, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || number > math.MaxInt64/unit {
		return 0, fmt.Errorf("%s is too large", text)
	}
	return Size(number * unit), nil
}

// UnmarshalJSON reads a number or a string.
func (s *Size) UnmarshalJSON(data []byte) (err error) {
	if string(data) == "null" {
		return nil
	}
	*s, err = ParseSize(strings.Trim(string(data), `"`))
	return err
}
