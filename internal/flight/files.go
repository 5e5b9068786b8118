package flight

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// DirName is the directory of the files in a node's state directory.
const DirName = "flight"

const (
	// keepEntries is how many entries of a volume stay when its file has reached maxBytes.
	keepEntries = 200
	maxBytes    = 128 << 10
	// recentBytes are searched for an open change, because few other changes of a volume follow it.
	recentBytes = 8 << 10
	// maxVolumes is the limit of files. The file that was written longest ago is removed first.
	maxVolumes = 256
	suffix     = ".jsonl"
)

// NewSuffix ends the name of a file that is being written to replace another one.
const NewSuffix = ".new"

// files keeps a file for each volume, with a line for each entry. Each line is one write, so it is
// complete if the process dies; readers skip a line that a power failure has torn.
type files struct{ dir string }

// FileName returns the name of a volume's file. An id that is no UUID may contain any characters.
func FileName(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id + suffix
	}
	sum := sha256.Sum256([]byte(volumeID))
	return hex.EncodeToString(sum[:]) + suffix
}

func (s *files) add(e Entry, always bool) (added bool, err error) {
	path := filepath.Join(s.dir, FileName(e.Volume))
	f, err := s.open(path, e.Outcome == Begun || always)
	if errors.Is(err, fs.ErrNotExist) {
		// Without a file no change is open. If a change ends, somebody has removed the file since
		// the change began.
		return !e.Seen, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	last := int64(recentBytes)
	if !e.Seen && e.Outcome != Begun && !always {
		last = maxBytes
	}
	entries, size, err := readLast(f, last, e.Event)
	if err != nil {
		return false, err
	}
	if e.Outcome != Begun && !always && !slices.ContainsFunc(Open(entries), e.sameAs) {
		return false, nil
	}
	line, err := json.Marshal(e)
	if err != nil {
		return false, err
	}
	line = append(line, '\n')
	if size+int64(len(line)) > maxBytes {
		if entries, _, err = readLast(f, maxBytes, ""); err != nil {
			return false, err
		}
		return true, replace(path, append(entries[max(0, len(entries)-keepEntries+1):], e))
	}
	// The last line may be torn.
	if size > 0 && !endsLine(f, size) {
		line = append([]byte{'\n'}, line...)
	}
	_, err = f.Write(line)
	return err == nil, err
}

// sameAs reports whether two entries belong to one change. If the disk was removed in between, they
// do not.
func (e Entry) sameAs(other Entry) bool {
	away := e.DiskSeq != 0 && other.DiskSeq != 0 && e.DiskSeq != other.DiskSeq
	return e.Event == other.Event && e.Path == other.Path && !away
}

// Open returns the begins of the changes in a volume's file that are not ended. A failure ends only
// one of several begins of the same change, because the outcome of an earlier one may still be
// unknown.
func Open(entries []Entry) []Entry {
	var open []Entry
	for _, e := range entries {
		switch e.Outcome {
		case Begun:
			open = append(open, e)
		case Done:
			open = slices.DeleteFunc(open, e.sameAs)
		case Failed:
			if i := slices.IndexFunc(open, e.sameAs); i >= 0 {
				open = slices.Delete(open, i, i+1)
			}
		}
	}
	return open
}

func (s *files) open(path string, make bool) (*os.File, error) {
	flags := os.O_RDWR | os.O_APPEND | noFollow
	if make {
		if err := s.makeRoom(path); err != nil {
			return nil, err
		}
		flags |= os.O_CREATE
	}
	for {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			return nil, err
		}
		if err := lock(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// Another process may have replaced it meanwhile.
		if now, err := os.Lstat(path); err == nil {
			if mine, err := f.Stat(); err == nil && os.SameFile(mine, now) {
				return f, nil
			}
		}
		_ = f.Close()
	}
}

// makeRoom makes the directory, and removes the oldest file if there are too many for a new one.
func (s *files) makeRoom(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil || len(entries) < maxVolumes {
		return err
	}
	var oldest fs.FileInfo
	for _, entry := range entries {
		info, err := entry.Info()
		if err == nil && info.Mode().IsRegular() && strings.Contains(info.Name(), suffix) &&
			(oldest == nil || info.ModTime().Before(oldest.ModTime())) {
			oldest = info
		}
	}
	if oldest == nil {
		return nil
	}
	err = os.Remove(filepath.Join(s.dir, oldest.Name()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func replace(path string, entries []Entry) error {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	for _, e := range entries {
		if err := encoder.Encode(e); err != nil {
			return err
		}
	}
	return ReplaceFile(path, text.Bytes())
}

// ReplaceFile replaces a file of the state directory atomically. It does not sync the file. It
// never writes to an existing temporary file, which may be a link.
func ReplaceFile(path string, b []byte) error {
	_ = os.Remove(path + NewSuffix)
	f, err := os.OpenFile(path+NewSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(path+NewSuffix, path)
}

func endsLine(f *os.File, size int64) bool {
	last := make([]byte, 1)
	_, err := f.ReadAt(last, size-1)
	return err == nil && last[0] == '\n'
}

// readLast reads the entries in the last bytes of a file, without invalid lines, and the file's
// size. If an event is given, it may omit entries of other events.
func readLast(f *os.File, last int64, event Event) (entries []Entry, size int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !info.Mode().IsRegular() {
		return nil, 0, errors.New("it is not a regular file")
	}
	r := io.NewSectionReader(f, max(0, info.Size()-last), last)
	return parse(r, []byte(event)), info.Size(), nil
}

// parse returns the entries whose lines contain the text. It decodes only those, because decoding
// takes much longer than reading and most lines of a long history are of other events.
func parse(r io.Reader, text []byte) (entries []Entry) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxBytes)
	for lines.Scan() {
		var e Entry
		if bytes.Contains(lines.Bytes(), text) && json.Unmarshal(lines.Bytes(), &e) == nil &&
			e.Event != "" && !e.Time.IsZero() {
			entries = append(entries, e)
		}
	}
	return entries
}

// Read returns the entries of a volume in a directory, the oldest first. A volume without a file
// has none.
func Read(dir, volumeID string) ([]Entry, error) {
	f, err := os.OpenFile(filepath.Join(dir, FileName(volumeID)), os.O_RDONLY|noFollow, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	entries, _, err := readLast(f, maxBytes, "")
	return entries, err
}
