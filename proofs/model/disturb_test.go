//go:build linux

package model

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// freeze freezes or thaws a filesystem as a backup does. No pod writes to a frozen filesystem,
// because the write would wait until it is thawed.
func (h *history) freeze(s step) (string, error) {
	key := at(s.vol, s.node)
	if kinds[s.vol].block() || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[key] || h.world.frozen[key] == (s.op == freeze) {
		return impossible, nil
	}
	if err := proof.SetFrozen(h.env.target(s.vol, s.node, s.pod), s.op == freeze); err != nil {
		return "", fmt.Errorf("%s: %w", s, err)
	}
	h.world.frozen[key] = s.op == freeze
	return "", nil
}

// hold opens a device for writing, as a process does that outlives the publication of its volume,
// or lets a loop device use it. letGo ends that use.
func (h *history) hold(s step) (string, error) {
	key := at(s.vol, s.node)
	if s.op == letGo {
		if !h.world.held[key] {
			return impossible, nil
		}
		return "", h.drop(key)
	}
	if !kinds[s.vol].block() || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[key] || h.world.held[key] || h.world.namesakes[key] {
		return impossible, nil
	}
	for _, d := range h.env.mustDevices(s.node) {
		if d.Serial != h.serials[s.vol] {
			continue
		}
		path := filepath.Join(h.env.Rack.Instance(s.node).Guest, "dev", d.Name)
		var holder io.Closer
		var err error
		if s.op == hold {
			holder, err = os.OpenFile(path, os.O_WRONLY, 0)
		} else {
			holder, err = loopOver(path)
		}
		if err != nil {
			return "", err
		}
		h.open[key], h.world.held[key] = holder, true
		h.count.holders++
		return "", nil
	}
	return impossible, nil
}

// loopDevice is the path of a loop device.
type loopDevice string

func loopOver(path string) (loopDevice, error) {
	out, err := exec.Command("losetup", "--find", "--show", path).Output()
	return loopDevice(strings.TrimSpace(string(out))), err
}

// Close releases the loop device.
func (l loopDevice) Close() error { return exec.Command("losetup", "--detach", string(l)).Run() }

// drop closes a device that is kept open.
func (h *history) drop(key string) error {
	holder := h.open[key]
	delete(h.open, key)
	delete(h.world.held, key)
	return holder.Close()
}

// dropLost closes the devices that the guest does not show any more.
func (h *history) dropLost(j *joint) error {
	for v := range kinds {
		for _, n := range nodes {
			if _, seen := j.device(v, n); h.world.held[at(v, n)] && !seen {
				if err := h.drop(at(v, n)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// dropAll closes every device that is kept open.
func (h *history) dropAll() error {
	var errs []error
	for key := range h.world.held {
		errs = append(errs, h.drop(key))
	}
	return errors.Join(errs...)
}

// sensible reports whether the model knows the answer to a mistaken call: the other volume, which
// the call uses by mistake, must be in a known state.
func (h *history) sensible(s step) bool {
	w, here, there := h.world, at(s.vol, s.node), at(s.other, s.node)
	if len(w.doubts) > 0 || w.rackDown || w.lost[here] || w.half[here] || w.lost[there] ||
		w.half[there] || w.namesakes[here] || w.namesakes[there] || w.bare[here] || w.bare[there] ||
		s.op != publishOther && s.other == s.vol {
		return false
	}
	staged := w.seen[stagedField(s.vol, s.node)] != ""
	switch s.op {
	case stageAstray:
		return staged || kinds[s.vol].block() && w.seen.published(s.vol, s.node)
	case publishOther:
		return staged || kinds[s.vol].block()
	}
	return true
}
