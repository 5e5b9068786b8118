package flightlog

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"os"
	"syscall"
)

// maxRead limits what is read of a file at once: the last bytes. A driver's file has half of it.
const maxRead = 256 << 10

// file is how far a file was read.
type file struct {
	// info is the file's when it was read.
	info os.FileInfo
	// end is the end of the last whole line that was read. That line has last's length and hash, by
	// which it is found in a file that was written anew: a driver drops the oldest lines of a file
	// that is too long.
	end  int64
	last struct {
		length int
		hash   [sha256.Size]byte
	}
}

// read returns the entries of the lines that were written since the last call, if the file's
// present info says that there may be some. A last line that is not whole yet is left for later.
func (f *file) read(path string, now os.FileInfo) (fresh []Entry) {
	if f.info != nil && os.SameFile(f.info, now) && f.info.Size() == now.Size() &&
		f.info.ModTime().Equal(now.ModTime()) || !now.Mode().IsRegular() {
		return nil
	}
	// O_NONBLOCK: what takes the file's place meanwhile may be a pipe.
	r, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil // it may be there next time
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	begin, anew := f.end, false
	if f.end > 0 && !f.continues(r) {
		begin, anew = 0, true
	}
	cut := info.Size()-begin > maxRead
	if cut {
		begin = info.Size() - maxRead
	}
	text, err := io.ReadAll(io.NewSectionReader(r, begin, info.Size()-begin))
	if err != nil {
		return nil
	}
	f.info = info
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	if cut {
		begin += int64(bytes.IndexByte(text, '\n') + 1)
		text = text[bytes.IndexByte(text, '\n')+1:] // its first line may not be whole
	}
	if len(text) == 0 {
		return nil
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	lines = lines[:len(lines)-1] // after the last line feed is nothing
	for _, line := range lines {
		hash := sha256.Sum256(line)
		if anew && hash == f.last.hash {
			fresh = nil // these were read before
			continue
		}
		if e, ok := parse(line); ok {
			fresh = append(fresh, e)
		}
	}
	last := lines[len(lines)-1]
	f.end = begin + int64(len(text))
	f.last.length, f.last.hash = len(last), sha256.Sum256(last)
	return fresh
}

// continues reports whether the file still has the last line that was read, at its place.
func (f *file) continues(r io.ReaderAt) bool {
	line := make([]byte, f.last.length)
	_, err := r.ReadAt(line, f.end-int64(len(line)))
	return err == nil && sha256.Sum256(line) == f.last.hash
}

func parse(line []byte) (e Entry, ok bool) {
	if len(line) > maxLine || json.Unmarshal(line, &e) != nil {
		return Entry{}, false
	}
	return e, e.Event != "" && !e.Time.IsZero()
}
