package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	// DefaultStateDir is on a tmpfs, so that a reboot removes the records with the mounts. It is not
	// the socket's directory, in which CSI allows only the socket.
	DefaultStateDir = "/run/" + volume.DriverName
	// recordVersion is the version of the records. The driver ignores a record of another version.
	recordVersion  = 1
	recordSuffix   = ".json"
	newSuffix      = flight.NewSuffix // of a record that is being written
	lockName       = "lock"           // the file of the locks (blockdev.Host.Lock)
	maxRecordBytes = 4096             // far more than a record needs
)

// volumeRecord records, in memory and in a file, which disk a volume is. The requests of
// NodeUnstageVolume and NodeUnpublishVolume do not say that: they contain only an id and a path.
type volumeRecord struct {
	Version  int    `json:"version"`
	Volume   string `json:"volume"`
	Instance string `json:"instance"`
	Disk     string `json:"disk"`
	Block    bool   `json:"block,omitempty"` // published as a raw device
	// Covers is the size of the filesystem if it is smaller than its disk, and otherwise 0. A stage
	// records it for NodeGetVolumeHealth, which must not read from the disk, because a read may hang.
	Covers int64 `json:"covers,omitempty"`
}

// asKnown tells save() to keep the recorded Covers, for calls that do not read the filesystem.
const asKnown = -1

// recordStore contains a record for each volume from its stage or publish to its unstage. Records
// only make answers stricter: without one, a call relies on the kernel's mount tables alone.
type recordStore struct {
	dir      string // empty means that records are kept in memory only
	instance string
	log      *slog.Logger

	mu sync.Mutex
	// guarded by mu
	kept map[string]volumeRecord
}

func (n *Service) records() *recordStore {
	n.once.Do(func() {
		n.store = &recordStore{dir: n.StateDir, instance: n.InstanceID, log: n.log()}
	})
	return n.store
}

func parseRecord(b []byte) (volumeRecord, error) {
	if len(b) > maxRecordBytes {
		return volumeRecord{}, fmt.Errorf("it has more than %d bytes", maxRecordBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	var r volumeRecord
	if err := decoder.Decode(&r); err != nil {
		return volumeRecord{}, fmt.Errorf("it is no record of a volume: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return volumeRecord{}, errors.New("something follows the record")
	}
	switch {
	case r.Version != recordVersion:
		return volumeRecord{}, fmt.Errorf("it has version %d, not %d", r.Version, recordVersion)
	case r.Volume == "", r.Instance == "", r.Disk == "":
		return volumeRecord{}, errors.New("it does not name a volume, an instance and a disk")
	}
	return r, nil
}

func (r volumeRecord) encode() ([]byte, error) {
	b, err := json.Marshal(r)
	return append(b, '\n'), err
}

func recordKey(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id
	}
	return volumeID
}

// recordFile hashes an id that is no UUID, because such an id may contain any characters.
func recordFile(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id + recordSuffix
	}
	sum := sha256.Sum256([]byte(volumeID))
	return hex.EncodeToString(sum[:]) + recordSuffix
}

type storedRecord struct {
	*recordStore
	id     string // the volume's id as in the request
	volume string // the id in the form that records have
	file   string // the name of the record's file
}

func (s *recordStore) of(volumeID string) storedRecord {
	return storedRecord{recordStore: s, id: volumeID, volume: recordKey(volumeID),
		file: recordFile(volumeID)}
}

// save records which disk a volume is. Stage and publish call it after every check that may refuse
// the request and before their first change, so that the driver knows the disk after a crash. If
// the record cannot be written, the call fails, because without a record unpublish and unstage rely
// on the kernel's mount tables alone.
//
// The record keeps its disk until the volume is unstaged. Block stays true once a workload has had
// the raw device, because the workload may still have it open.
func (s storedRecord) save(disk string, block bool, covers int64) error {
	r := volumeRecord{Version: recordVersion, Volume: s.volume, Instance: s.instance,
		Disk: disk, Block: block, Covers: max(covers, 0)}
	if known, ok := s.load(); ok {
		if volume.Serial(known.Disk) != volume.Serial(disk) {
			return csierr.New(csierr.StagedDifferently, "the volume is disk %s on this node, but the "+
				"request names disk %s; unstage the volume first", known.Disk, disk)
		}
		r.Block = r.Block || known.Block
		if covers == asKnown {
			r.Covers = known.Covers
		}
	}
	s.keep(r)
	if s.dir == "" {
		return nil
	}
	if kept, err := s.read(); err == nil && kept == r {
		return nil
	}
	if err := s.write(r); err != nil {
		return csierr.New(csierr.StateNotKept, "write down in the state directory which disk the volume "+
			"is: %w", err)
	}
	return nil
}

// saveDisk records the disk of a volume that has no record and is about to be unmounted. A failure
// is logged and does not stop the unmount.
func (s storedRecord) saveDisk(serial string) {
	if _, known := s.load(); known {
		return
	}
	if err := s.save(serial, false, asKnown); err != nil {
		s.log.Warn("a volume is unstaged without a record of its disk", "volume", s.id, "error", err)
	}
}

// load returns the record of a volume. It logs and ignores an invalid one.
func (s storedRecord) load() (volumeRecord, bool) {
	s.mu.Lock()
	r, ok := s.kept[s.volume]
	s.mu.Unlock()
	if ok || s.dir == "" {
		return r, ok
	}
	r, err := s.read()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return volumeRecord{}, false
	case err != nil:
		s.log.Warn("a record in the state directory is ignored", "file", s.file, "error", err)
		return volumeRecord{}, false
	}
	s.keep(r)
	return r, true
}

// otherVolume describes the disk with this serial if the records show that the disk is not the
// volume's. Otherwise it returns "". certain is true if a record names the disk, or if the serial
// is "" and the volume has a record.
func (s storedRecord) otherVolume(serial string) (why string, certain bool) {
	known, ok := s.load()
	want := volume.Serial(known.Disk)
	if ok && (serial == "" || want == serial) {
		return "", true
	}
	for _, r := range s.all() {
		if r.Volume != s.volume && volume.Serial(r.Disk) == serial {
			return fmt.Sprintf("the disk with serial %q, which is volume %s", serial,
				csierr.Plain(r.Volume)), true
		}
	}
	if ok {
		return fmt.Sprintf("the disk with serial %q, but the volume's is %q", serial, want), false
	}
	return "", false
}

// all() lists the valid records, those in both memory and a file twice. open() logs invalid files.
func (s *recordStore) all() []volumeRecord {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.kept))
	s.mu.Unlock()
	if s.dir == "" {
		return all
	}
	entries, _ := os.ReadDir(s.dir)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), recordSuffix) {
			continue
		}
		r, err := readRecordFile(filepath.Join(s.dir, e.Name()))
		if err == nil && r.Instance == s.instance && recordFile(r.Volume) == e.Name() {
			all = append(all, r)
		}
	}
	return all
}

// delete returns no error, because a record that stays can only make later answers stricter.
func (s storedRecord) delete() {
	s.mu.Lock()
	delete(s.kept, s.volume)
	s.mu.Unlock()
	if s.dir == "" {
		return
	}
	path := filepath.Join(s.dir, s.file)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("a record stays in the state directory", "file", s.file, "error", err)
	}
}

func (s storedRecord) read() (volumeRecord, error) {
	r, err := readRecordFile(filepath.Join(s.dir, s.file))
	switch {
	case err != nil:
		return volumeRecord{}, err
	case r.Volume != s.volume:
		return volumeRecord{}, errors.New("it is about another volume")
	case r.Instance != s.instance:
		return volumeRecord{}, errors.New("it is another instance's")
	}
	return r, nil
}

func readRecordFile(path string) (volumeRecord, error) {
	// Without O_NONBLOCK, the call would wait for a writer if the file is a FIFO.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return volumeRecord{}, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxRecordBytes+1))
	if err != nil {
		return volumeRecord{}, err
	}
	return parseRecord(b)
}

// write replaces the record's file. It does not sync the file, because a record is about mounts,
// and a power failure ends those.
func (s *recordStore) write(r volumeRecord) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	path := filepath.Join(s.dir, recordFile(r.Volume))
	err = flight.ReplaceFile(path, b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// The directory is missing: somebody has removed it since the driver started.
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	return flight.ReplaceFile(path, b)
}

// OpenState prepares the state directory, when a driver starts.
func (n *Service) OpenState() error { return n.records().open() }

// open does not name the directory in errors, because errors must not contain values of settings.
func (s *recordStore) open() error {
	if s.dir == "" {
		s.log.Warn("no state directory: after a restart the node will not know which " +
			"disk a volume is")
		return nil
	}
	const advice = "name a directory that the driver can make and write, and that outlives its " +
		"process, such as one of the host's"
	if err := tryState(s.dir); err != nil {
		return fmt.Errorf("no records can be kept there (%w); %s", csierr.WithoutPath(err), advice)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("it cannot be listed (%w); %s", csierr.WithoutPath(err), advice)
	}
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		switch {
		case e.Type().IsRegular() && unfinishedFile().MatchString(e.Name()):
			_ = os.Remove(path) // the next record of the volume overwrites a file that stays
		case strings.HasSuffix(e.Name(), recordSuffix):
			if _, err := readRecordFile(path); err != nil {
				s.log.Warn("a record in the state directory is ignored", "file", e.Name(), "error", err)
			}
		}
	}
	return nil
}

// unfinishedFile matches the names of the temporary files of write and tryState. open() removes no
// other file, because an operator may name a directory that other programs use, too.
var unfinishedFile = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|` +
		`[0-9a-f]{64})\.json|trial-[0-9]+)\.new$`)
})

func tryState(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	locks, err := os.OpenFile(filepath.Join(dir, lockName),
		os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err = errors.Join(err, locks.Close()); err != nil {
		return err
	}
	trial, err := os.CreateTemp(dir, "trial-*"+newSuffix)
	if err != nil {
		return err
	}
	_, err = trial.WriteString("x")
	err = errors.Join(err, trial.Close())
	// Another process of the driver removes such files when it starts, and may have removed this one.
	if gone := os.Remove(trial.Name()); !errors.Is(gone, fs.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	return err
}

func (s *recordStore) keep(r volumeRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		s.kept = map[string]volumeRecord{}
	}
	s.kept[r.Volume] = r
}
