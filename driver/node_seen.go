package driver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

const (
	// defaultStateDir is gone after a reboot, and so is everything that it tells of. It is not the
	// socket's directory: CSI wants nothing there but the socket.
	defaultStateDir = "/run/" + volume.DriverName
	// seenVersion is what the records hold; those of another version are not believed.
	seenVersion = 1
	seenSuffix  = ".json"
	newSuffix   = ".new" // a record that is being written
	// seenMaxBytes is far more than a record takes.
	seenMaxBytes = 4096
)

// seenVolume is what a node knows of a volume between its calls, in memory and as a file: which
// disk it is. NodeUnstageVolume and NodeUnpublishVolume are told an id and a path, no more.
type seenVolume struct {
	Version  int    `json:"version"`
	Volume   string `json:"volume"`
	Instance string `json:"instance"`
	Disk     string `json:"disk"`
	Block    bool   `json:"block,omitempty"` // published as a raw device
}

// seenVolumes keeps one record for each volume that this node has staged or published and not
// unstaged. Records only make answers stricter: without one a call goes by what the kernel shows.
// So a record that is lost, or that makes no sense, harms nobody.
type seenVolumes struct {
	mu sync.Mutex
	// guarded by mu
	volumes map[string]seenVolume
}

// parseSeen reads a record. What is torn, of another version or more than a record is an error.
func parseSeen(b []byte) (seenVolume, error) {
	if len(b) > seenMaxBytes {
		return seenVolume{}, fmt.Errorf("it has more than %d bytes", seenMaxBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	var r seenVolume
	if err := decoder.Decode(&r); err != nil {
		return seenVolume{}, fmt.Errorf("it is no record of a volume: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return seenVolume{}, errors.New("something follows the record")
	}
	switch {
	case r.Version != seenVersion:
		return seenVolume{}, fmt.Errorf("it has version %d, not %d", r.Version, seenVersion)
	case r.Volume == "", r.Instance == "", r.Disk == "":
		return seenVolume{}, errors.New("it does not name a volume, an instance and a disk")
	}
	return r, nil
}

// encode is the record as a file holds it.
func (r seenVolume) encode() ([]byte, error) {
	b, err := json.Marshal(r)
	return append(b, '\n'), err
}

// seenKey is a volume id in the one way in which it is remembered.
func seenKey(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id
	}
	return volumeID
}

// seenFile is the name of a volume's record. An id that is no UUID may hold anything.
func seenFile(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id + seenSuffix
	}
	sum := sha256.Sum256([]byte(volumeID))
	return hex.EncodeToString(sum[:]) + seenSuffix
}

// remember keeps what disk a volume is, after everything that may refuse the call and before the
// first thing is done with it: a driver that dies after that still knows it. A record that cannot
// be written is an error, for the calls that undo it could not be as strict as they have to be.
//
// Until it is unstaged, a volume stays the disk that it is, and one that workloads had as a raw
// device stays one of which they may have the device open.
func (n *Node) remember(ctx context.Context, v nodeVolume) error {
	r := seenVolume{Version: seenVersion, Volume: seenKey(v.ID), Instance: n.InstanceID,
		Disk: v.DiskName, Block: v.Block}
	if known, ok := n.recall(ctx, v.ID); ok {
		if volume.Serial(known.Disk) != v.serial() {
			return csierr.New(csierr.StagedDifferently, "the volume is disk %s on this node, but the "+
				"request names disk %s; unstage the volume first", known.Disk, v.DiskName)
		}
		r.Block = r.Block || known.Block
	}
	n.seen.keep(r)
	if n.StateDir == "" {
		return nil
	}
	if kept, err := n.readSeen(v.ID); err == nil && kept == r {
		return nil
	}
	if err := n.writeSeen(r); err != nil {
		return csierr.New(csierr.StateNotKept, "write down in the state directory which disk the volume "+
			"is: %w", err)
	}
	return nil
}

// rememberDevice keeps the disk of a volume that is about to be taken down and is not known. It is
// no reason to leave the volume where it is when that fails.
func (n *Node) rememberDevice(ctx context.Context, volumeID string, d blockdev.Device) {
	if _, known := n.recall(ctx, volumeID); known {
		return
	}
	if err := n.remember(ctx, nodeVolume{Volume: filesystem.Volume{ID: volumeID, DiskName: d.Serial}}); err != nil {
		n.log().WarnContext(ctx, "a volume is unstaged without a record of its disk",
			"volume", volumeID, "error", err)
	}
}

// recall tells what is known of a volume. A record that cannot be believed is not known, and the
// log says so.
func (n *Node) recall(ctx context.Context, volumeID string) (seenVolume, bool) {
	if r, ok := n.seen.find(seenKey(volumeID)); ok {
		return r, true
	}
	if n.StateDir == "" {
		return seenVolume{}, false
	}
	r, err := n.readSeen(volumeID)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return seenVolume{}, false
	case err != nil:
		n.log().WarnContext(ctx, "a record in the state directory is ignored",
			"file", seenFile(volumeID), "error", err)
		return seenVolume{}, false
	}
	n.seen.keep(r)
	return r, true
}

// anothers says why the disk with that serial cannot be the volume's: the volume is known to be
// another disk, or else the disk is known to be another volume. It says "" when no record speaks
// against it.
func (n *Node) anothers(ctx context.Context, volumeID, serial string) string {
	if known, ok := n.recall(ctx, volumeID); ok {
		if want := volume.Serial(known.Disk); want != serial {
			return fmt.Sprintf("the disk with serial %q, but the volume's is %q", serial, want)
		}
		return ""
	}
	for _, r := range n.records() {
		if r.Volume != seenKey(volumeID) && volume.Serial(r.Disk) == serial {
			return fmt.Sprintf("the disk with serial %q, which is volume %s", serial, csierr.Plain(r.Volume))
		}
	}
	return ""
}

// records are all that the node knows of its volumes. What cannot be read, or not be believed, was
// named in the log at the start.
func (n *Node) records() []seenVolume {
	all := n.seen.all()
	if n.StateDir == "" {
		return all
	}
	entries, _ := os.ReadDir(n.StateDir)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), seenSuffix) {
			continue
		}
		r, err := readRecord(filepath.Join(n.StateDir, e.Name()))
		if err == nil && r.Instance == n.InstanceID && seenFile(r.Volume) == e.Name() {
			all = append(all, r)
		}
	}
	return all
}

// forget drops what is known of a volume that is gone from this node. A record that stays behind
// makes a later answer stricter, no more, so that is no reason to fail.
func (n *Node) forget(ctx context.Context, volumeID string) {
	n.seen.drop(seenKey(volumeID))
	if n.StateDir == "" {
		return
	}
	path := filepath.Join(n.StateDir, seenFile(volumeID))
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log().WarnContext(ctx, "a record stays in the state directory",
			"file", seenFile(volumeID), "error", err)
	}
}

// readSeen reads the record of a volume, which has to be this node's and that volume's.
func (n *Node) readSeen(volumeID string) (seenVolume, error) {
	r, err := readRecord(filepath.Join(n.StateDir, seenFile(volumeID)))
	switch {
	case err != nil:
		return seenVolume{}, err
	case r.Volume != seenKey(volumeID):
		return seenVolume{}, errors.New("it is about another volume")
	case r.Instance != n.InstanceID:
		return seenVolume{}, errors.New("it is another instance's")
	}
	return r, nil
}

func readRecord(path string) (seenVolume, error) {
	// O_NONBLOCK keeps what is no file after all from holding us up.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return seenVolume{}, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, seenMaxBytes+1))
	if err != nil {
		return seenVolume{}, err
	}
	return parseSeen(b)
}

// writeSeen puts the record in its place whole. It is not synced: after a power failure nothing is
// mounted, so nothing is there to be known of.
func (n *Node) writeSeen(r seenVolume) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	path := filepath.Join(n.StateDir, seenFile(r.Volume))
	err = replaceFile(path, b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Somebody cleared the directory away under a running driver.
	if err := os.MkdirAll(n.StateDir, 0o700); err != nil {
		return err
	}
	return replaceFile(path, b)
}

func replaceFile(path string, b []byte) error {
	if err := os.WriteFile(path+newSuffix, b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+newSuffix, path)
}

// openState makes the state directory ready, shows that it can be written, and clears away what a
// driver left that died while it wrote. Its error does not name the directory, which is the
// operator's value.
func (n *Node) openState() error {
	if n.StateDir == "" {
		n.log().Warn("no state directory: after a restart the node does not know which " +
			"disk a volume is")
		return nil
	}
	const advice = "name a directory that the driver can make and write, and that outlives its " +
		"process, such as one of the host's"
	if err := tryState(n.StateDir); err != nil {
		return fmt.Errorf("no records can be kept there (%w); %s", csierr.WithoutPath(err), advice)
	}
	entries, err := os.ReadDir(n.StateDir)
	if err != nil {
		return fmt.Errorf("it cannot be listed (%w); %s", csierr.WithoutPath(err), advice)
	}
	for _, e := range entries {
		path := filepath.Join(n.StateDir, e.Name())
		switch {
		case e.Type().IsRegular() && unfinishedFile.MatchString(e.Name()):
			_ = os.Remove(path) // one that stays is overwritten when its volume comes again
		case strings.HasSuffix(e.Name(), seenSuffix):
			if _, err := readRecord(path); err != nil {
				n.log().Warn("a record in the state directory is ignored",
					"file", e.Name(), "error", err)
			}
		}
	}
	return nil
}

// unfinishedFile is the name of a file that writeSeen or tryState was about to finish. Nothing else
// is removed: an operator may name a directory that others use, too.
var unfinishedFile = regexp.MustCompile(`^(([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|` +
	`[0-9a-f]{64})\.json|trial-[0-9]+)\.new$`)

// tryState makes the directory and a file in it, and takes the file away again.
func tryState(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	trial, err := os.CreateTemp(dir, "trial-*"+newSuffix)
	if err != nil {
		return err
	}
	_, err = trial.WriteString("x")
	err = errors.Join(err, trial.Close())
	// Another driver that starts here clears it away.
	if gone := os.Remove(trial.Name()); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	return err
}

func (s *seenVolumes) keep(r seenVolume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.volumes == nil {
		s.volumes = map[string]seenVolume{}
	}
	s.volumes[r.Volume] = r
}

func (s *seenVolumes) drop(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.volumes, key)
}

func (s *seenVolumes) find(key string) (seenVolume, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.volumes[key]
	return r, ok
}

func (s *seenVolumes) all() []seenVolume {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.volumes))
}
