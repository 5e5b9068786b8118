package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// binaries compiles the programs as `make binaries` does, and writes a bill of materials for each.
func (r *release) binaries(ctx context.Context) error {
	bin := filepath.Join(r.stage, "context", "bin")
	_, err := r.output(ctx, "make", "binaries", "RELEASE="+r.Version, "BIN="+bin,
		"ARCH="+strings.Join(r.Arch, " "))
	if err != nil {
		return err
	}
	for _, arch := range r.Arch {
		dir := filepath.Join(bin, "linux-"+arch)
		programs, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, program := range programs {
			content, err := os.ReadFile(filepath.Join(dir, program.Name()))
			if err != nil {
				return err
			}
			name := program.Name() + "-linux-" + arch
			if err := os.WriteFile(filepath.Join(r.made, name), content, 0o755); err != nil {
				return err
			}
			info, err := buildinfo.Read(bytes.NewReader(content))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			b := r.bill(name, content)
			b.parts = b.modules(info)
			if err := r.writeBill(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// sums is the file of the checksums. It marks a folder as a release.
const sums = "SHA256SUMS"

// checksums writes the list of the images and the chart, and the checksums of all files in the form
// of sha256sum.
func (r *release) checksums(context.Context) error {
	if err := r.write(digests, []byte(r.pushed.String())); err != nil {
		return err
	}
	files, err := os.ReadDir(r.made)
	if err != nil {
		return err
	}
	var list bytes.Buffer
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(r.made, file.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&list, "%x  %s\n", sha256.Sum256(content), file.Name())
	}
	return r.write(sums, list.Bytes())
}

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

// repack packs the files of a .tgz again, without their times and owners.
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
