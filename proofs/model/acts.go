//go:build linux

package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	// blocks is the number of blocks to which pods write in each volume.
	blocks    = 8
	blockSize = 4096
)

// content describes the data that the model expects in a volume.
type content struct {
	// written contains, for each block, the acknowledged value and then the values that were written
	// later without acknowledgment. A block that was never written has the value 0.
	written [blocks][]uint64
	// partial is set if the volume was detached from its node while in use. Then each block may have
	// its acknowledged or any later value.
	partial bool
	// formatted means that the driver must find data, and so must not format the volume.
	formatted bool
	// forged contains the files with forged records, or is nil if there are none.
	forged proof.ForgedFiles
}

func newContent() *content {
	c := &content{}
	for b := range c.written {
		c.written[b] = []uint64{0}
	}
	return c
}

// clone returns the content of a snapshot. It is partial, because the volume may have been in use.
func (c *content) clone() *content {
	copied := *c
	copied.partial = true
	for b, values := range c.written {
		copied.written[b] = slices.Clone(values)
	}
	return &copied
}

// wrote adds a value. A synced value is acknowledged, and replaces all earlier values.
func (c *content) wrote(block int, value uint64, synced bool) {
	if synced {
		// The driver's checks find data only in the first and the last block of a raw device.
		c.formatted = c.formatted || block == 0 || block == blocks-1
		c.written[block] = nil
	}
	c.written[block] = append(c.written[block], value)
}

// flushed keeps only the last value of each block, which is on the disk, unless c is partial.
func (c *content) flushed() {
	for b, values := range c.written {
		if !c.partial {
			c.written[b] = values[len(values)-1:]
		}
	}
}

// cut marks the content as partial, because the volume was detached while in use. c may be nil.
func (c *content) cut() {
	if c != nil {
		c.partial = true
	}
}

func (c *content) hasFilesystem() bool { return c != nil && c.formatted }

// values returns the values that a block may have, the most likely one first.
func (c *content) values(block int) []uint64 {
	all := slices.Clone(c.written[block])
	slices.Reverse(all)
	if !c.partial {
		return all[:1]
	}
	return all
}

// read fails if the model does not allow a block's value. Otherwise it records the value.
func (c *content) read(v int, data [][]byte) error {
	for b, got := range data {
		values := c.values(b)
		i := slices.IndexFunc(values, func(value uint64) bool {
			return bytes.Equal(got, pattern(v, b, value))
		})
		if i < 0 {
			return fmt.Errorf("v%d block %d contains %s, the model allows value %v (acknowledged: %d)",
				v, b, describe(v, b, got), values, c.written[b][0])
		}
		if c.partial {
			c.written[b] = values[i : i+1]
		}
	}
	c.partial = false
	return nil
}

// pattern returns a block's bytes, which are the same in a volume and in volumes restored from it.
func pattern(v, block int, value uint64) []byte {
	data := make([]byte, blockSize)
	if value == 0 {
		return data
	}
	var key [32]byte
	copy(key[:], fmt.Sprintf("value %d block %d", value, block))
	_, _ = rand.NewChaCha8(key).Read(data)
	copy(data, fmt.Sprintf("v%d block %d value %d\n", origin(v), block, value))
	return data
}

// origin returns the volume at the beginning of the chain of snapshots from which v was restored.
func origin(v int) int {
	if s := kinds[v].snap; s != 0 {
		return origin(snapOf[s])
	}
	return v
}

func describe(v, block int, data []byte) string {
	if bytes.Equal(data, make([]byte, len(data))) {
		return "zeros"
	}
	head, _, _ := bytes.Cut(data, []byte("\n"))
	var w, b int
	var value uint64
	n, err := fmt.Sscanf(string(head), "v%d block %d value %d", &w, &b, &value)
	switch {
	case err != nil || n != 3:
		return fmt.Sprintf("foreign bytes (%.16x…)", data)
	case w == origin(v) && b == block && bytes.Equal(data, pattern(v, b, value)):
		return fmt.Sprintf("value %d", value)
	}
	return fmt.Sprintf("a damaged or misplaced copy of v%d block %d value %d", w, b, value)
}

func fileOf(path string, v int) string {
	if kinds[v].block() {
		return path
	}
	return filepath.Join(path, "blocks")
}

// offsetOf returns a block's offset. The last block of a raw volume is at the device's end.
func offsetOf(v, block int) int64 {
	switch {
	case !kinds[v].block():
		return int64(block) * blockSize
	case block == blocks-1:
		return gib - blockSize
	}
	return int64(block) * gib / blocks
}

func put(path string, v, block int, value uint64, synced bool) error {
	flags := os.O_WRONLY
	if !kinds[v].block() {
		flags |= os.O_CREATE
	}
	file, err := os.OpenFile(fileOf(path, v), flags, 0o640)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(pattern(v, block, value), offsetOf(v, block))
	if err == nil && synced {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil || !synced || kinds[v].block() {
		return err
	}
	// The file may be new, so the directory that contains its name must be synced, too.
	return proof.SyncDir(path)
}

// contents reads all blocks. A block that was never written reads as zeros.
func contents(path string, v int) (data [][]byte, err error) {
	for range blocks {
		data = append(data, make([]byte, blockSize))
	}
	file, err := os.Open(fileOf(path, v))
	if errors.Is(err, fs.ErrNotExist) && !kinds[v].block() {
		return data, nil
	}
	if err != nil {
		return nil, err
	}
	for b := range data {
		if _, err = file.ReadAt(data[b], offsetOf(v, b)); err != nil && !errors.Is(err, io.EOF) {
			return nil, errors.Join(err, file.Close())
		}
	}
	return data, file.Close()
}

// impossible is the result of a step that cannot be made in the present state.
const impossible = "impossible"

// act does a step that is not a CSI call. It returns a text for the transcript.
func (h *History) act(ctx context.Context, s Step) (said string, err error) {
	defer harness.Catch(&err)
	switch s.op {
	case write, writeSynced:
		return h.write(s), nil
	case freeze, thaw:
		return h.freeze(s), nil
	case hold, holdByLoop, letGo:
		return h.hold(s), nil
	case makeNamesake:
		return h.makeNamesake(ctx, s), nil
	case takeNamesake:
		return h.takeNamesake(ctx, s), nil
	case wait:
		h.wait(ctx)
		return "", nil
	case fault:
		return h.addFault(ctx, s.fault), nil
	case killController, endController, killNode, endNode:
		return h.replace(ctx, s), nil
	case stopInstance, startInstance:
		return h.switchInstance(ctx, s), nil
	}
	return h.actOnRack(ctx, s.op), nil
}

func (h *History) write(s Step) string {
	w, here := h.world, h.world.place(s)
	content := w.contents[s.vol]
	if content == nil || w.seen[publishedField(s.vol, s.node, s.pod)] == "" || here.lost ||
		here.frozen {
		return impossible
	}
	target := h.env.target(s.vol, s.node, s.pod)
	if s.node == h.ReadOnlyAt {
		if put(target, s.vol, s.block, w.value+1, true) == nil {
			fail("a volume is read-only and was written")
		}
		return " = refused"
	}
	h.forge(s, content)
	w.value++
	synced := s.op == writeSynced
	if err := put(target, s.vol, s.block, w.value, synced); err != nil {
		fail("a pod cannot write: %w", err)
	}
	content.wrote(s.block, w.value, synced)
	if synced {
		h.count.bytes += blockSize
	}
	return fmt.Sprintf(" = value %d", w.value)
}

// forge writes files with forged records before a pod writes to a filesystem for the first time.
func (h *History) forge(s Step, content *content) {
	if kinds[s.vol].block() || content.forged != nil {
		return
	}
	id, size := h.world.seen[diskField(s.vol)], kinds[s.vol].bytes()
	content.forged = harness.Got(proof.Forgery{Volume: id, Disk: h.world.serials[s.vol],
		Filesystem: kinds[s.vol].fsType, SizeBytes: size, NextBytes: 2 * size,
		Device: proof.DiskFile(h.env.Rack, id)}.Write(h.env.target(s.vol, s.node, s.pod)))
}

// wait waits until every abandoned call has ended. Then no changes are in doubt any more.
func (h *History) wait(ctx context.Context) {
	h.env.awaitIdle(ctx, h.world.rackDown)
	if h.world.rackDown {
		return // results of earlier requests are unknown while the rack is down
	}
	h.check(ctx, nil)
	h.world.doubts = nil
	h.world.recordsFirst = slices.Contains(h.world.faults, noDevice)
}

func (h *History) addFault(ctx context.Context, name string) string {
	devices := func(fault string) bool { return fault == noDevice || fault == "slow device" }
	if h.world.rackDown || len(h.world.faults) >= 4 ||
		devices(name) && slices.ContainsFunc(h.world.faults, devices) {
		return impossible
	}
	if name == noDevice {
		h.world.recordsFirst = true
		h.env.recordFirst(ctx, true)
	}
	h.faultNames[harness.Got(h.env.Rack.Admin.AddFault(ctx, faults[name].Fault))] = name
	h.world.faults = append(h.world.faults, name)
	return ""
}

func (h *History) replace(ctx context.Context, s Step) string {
	if (s.op == killNode || s.op == endNode) && h.world.down[s.node] {
		return impossible
	}
	driver := h.env.driver(s)
	if s.op == killNode || s.op == killController {
		driver.Kill()
	} else {
		harness.Must(driver.Stop())
	}
	h.count.restarts++
	harness.Must(driver.Start(ctx))
	return ""
}

func (h *History) switchInstance(ctx context.Context, s Step) string {
	stop := s.op == stopInstance
	if h.world.rackDown || h.world.down[s.node] == stop {
		return impossible
	}
	h.count.restarts++
	if !stop {
		h.env.startNode(ctx, s.node)
		h.world.down[s.node] = false
		return ""
	}
	h.env.stopNode(ctx, s.node)
	h.world.down[s.node] = true
	for v := 1; v < len(kinds); v++ {
		// The stop of the instance ends the mounts. Data that were not synced may be lost.
		if h.world.seen.mounted(v, s.node) {
			h.world.contents[v].cut()
		}
		h.world.at(v, s.node).staged, h.world.at(v, s.node).frozen = false, false
		h.world.seen[stagedField(v, s.node)] = ""
		for _, p := range pods {
			h.world.seen[publishedField(v, s.node, p)] = ""
		}
	}
	return ""
}

func (h *History) actOnRack(ctx context.Context, o op) string {
	if h.world.rackDown != (o == startRack) {
		return impossible
	}
	switch o {
	case killRack:
		h.env.Rack.Kill()
		h.world.rackDown = true
		return ""
	case restartRack:
		harness.Must(h.env.Bystanders.Suspend())
		err := h.env.Rack.Terminate()
		if err != nil && !strings.Contains(err.Error(), "still held") {
			harness.Must(err)
		}
		for v, n := range everywhere {
			if h.world.seen.mounted(v, n) {
				h.world.at(v, n).lost = true // after the restart the disks have other devices
				h.world.contents[v].cut()
			}
		}
	}
	h.count.restarts++
	h.world.rackDown = false
	h.world.faults, h.world.recordsFirst = nil, false // a restart of the rack removes its faults
	harness.Must(h.env.Rack.Start(ctx))
	h.env.resumeBystanders(ctx)
	return ""
}

// freeze freezes or thaws a filesystem, as a backup does. Pods do not write to a frozen filesystem,
// because a write blocks until the filesystem is thawed.
func (h *History) freeze(s Step) string {
	here := h.world.place(s)
	if kinds[s.vol].block() || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		here.lost || here.frozen == (s.op == freeze) {
		return impossible
	}
	if err := proof.SetFrozen(h.env.target(s.vol, s.node, s.pod), s.op == freeze); err != nil {
		fail("%s: %w", s, err)
	}
	here.frozen = s.op == freeze
	return ""
}

// hold opens a volume's device or puts a loop device over it. The step letGo ends either. So a
// device can be in use after its volume was unpublished.
func (h *History) hold(s Step) string {
	here := h.world.place(s)
	if s.op == letGo {
		if here.open == nil {
			return impossible
		}
		harness.Must(here.drop())
		return ""
	}
	if h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		here.lost || here.open != nil || here.namesake {
		return impossible
	}
	device, err := h.env.Rack.Instance(s.node).Device(h.world.serials[s.vol])
	if err != nil {
		return impossible // the guest does not show the device
	}
	if s.op == hold {
		here.open = harness.Got(os.OpenFile(device.Path, os.O_WRONLY, 0))
	} else {
		here.open = loopOver(device.Path)
	}
	h.count.holders++
	return ""
}

type loopDevice string

func loopOver(path string) loopDevice {
	out := harness.Got(exec.Command("losetup", "--find", "--show", path).Output())
	return loopDevice(strings.TrimSpace(string(out)))
}

// Close detaches the loop device.
func (l loopDevice) Close() error { return exec.Command("losetup", "--detach", string(l)).Run() }

func (p *place) drop() (err error) {
	if p.open != nil {
		err, p.open = p.open.Close(), nil
	}
	return err
}

func (w *world) dropAll() (err error) {
	for _, p := range w.places {
		err = errors.Join(err, p.drop())
	}
	return err
}

// sensible reports whether the model knows the right answer to a call that is wrong on purpose. The
// model must know the states of the volumes s.vol and s.other.
func (w *world) sensible(s Step) bool {
	here, there := w.place(s), w.at(s.other, s.node)
	if len(w.doubts) > 0 || w.rackDown || s.op != publishOther && s.other == s.vol {
		return false
	}
	for _, p := range []*place{here, there} {
		if p.lost || p.half || p.namesake || p.bare {
			return false
		}
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
