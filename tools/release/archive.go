package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"
)

// file is an entry of an archive.
type file struct {
	name    string
	content []byte
}

// pack writes a tar whose bytes depend only on names, contents and the date.
func pack(w io.Writer, files []file, date time.Time) error {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	t := tar.NewWriter(w)
	for _, f := range files {
		err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o644,
			Size: int64(len(f.content)), ModTime: date, Format: tar.FormatPAX})
		if err != nil {
			return err
		}
		if _, err := t.Write(f.content); err != nil {
			return err
		}
	}
	return t.Close()
}

// repack packs a .tgz again, without its times and owners.
func repack(packed io.Reader, date time.Time) ([]byte, error) {
	var files []file
	err := eachFile(packed, func(header *tar.Header, content []byte) {
		files = append(files, file{header.Name, content})
	})
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	if err := errors.Join(pack(zipped, files, date), zipped.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// eachFile visits the entries of a .tgz.
func eachFile(packed io.Reader, visit func(header *tar.Header, content []byte)) error {
	unzipped, err := gzip.NewReader(packed)
	if err != nil {
		return err
	}
	for t := tar.NewReader(unzipped); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		content, err := io.ReadAll(t)
		if err != nil {
			return err
		}
		visit(header, content)
	}
}

// filesIn returns all files of a tree.
func filesIn(tree fs.FS) ([]file, error) {
	var files []file
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		files = append(files, file{path, content})
		return err
	})
	return files, err
}
