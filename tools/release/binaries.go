package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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

// checksums lists what is pushed, and the checksum of every file, as sha256sum does.
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
