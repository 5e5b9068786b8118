package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// write creates the file atomically. The value is in single quotes, because the kubelet, which
// reads the file for a fileKeyRef, accepts no other form.
func write(path, id string) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	_, err = fmt.Fprintf(file, "OXIDE_INSTANCE_ID='%s'\n", id)
	if err == nil {
		// The driver runs as another user.
		err = file.Chmod(0o644)
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
