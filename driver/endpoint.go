package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// socketMode lets the socket's owner and group in: kubelet and the sidecars.
const socketMode = 0o660

// socketPath reads an endpoint. CSI allows Unix sockets only, with a name that ends in .sock.
func socketPath(endpoint string) (string, error) {
	expected := errors.New("has to be unix:///path/name.sock, an absolute path after three slashes")
	u, err := url.Parse(endpoint)
	switch {
	case err != nil, u.Scheme != "unix", u.Host != "", u.Opaque != "", u.User != nil,
		u.RawQuery != "", u.Fragment != "", !filepath.IsAbs(u.Path):
		return "", expected
	case !strings.HasPrefix(endpoint, "unix:///"), !strings.HasSuffix(u.Path, ".sock"):
		return "", expected
	}
	path := filepath.Clean(u.Path)
	// The kernel's sun_path has 108 bytes with its NUL.
	if len(path) > 107 {
		return "", fmt.Errorf("has a path of %d bytes; a socket's has at most 107", len(path))
	}
	return path, nil
}

// listenUnix makes the socket, and nothing beside it: the directory belongs to the supervisor. A
// socket left by a process that was killed is removed; one that answers, or anything else, is not.
func listenUnix(path string) (net.Listener, error) {
	if err := removeStale(path); err != nil {
		return nil, err
	}
	// The socket is made with its mode, never wider for a moment. Serving has not begun, so no
	// other goroutine makes files meanwhile.
	old := syscall.Umask(0o777 &^ socketMode)
	listener, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("make the socket: %w", reasonOf(err))
	}
	return listener, nil
}

func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if !isDirectory(filepath.Dir(path)) {
			return errors.New("the socket's directory does not exist; the supervisor makes it")
		}
		return nil
	case err != nil:
		return fmt.Errorf("look for an old socket: %w", reasonOf(err))
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("something that is no socket is in the socket's place; remove it")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		_ = conn.Close()
		return errors.New("another process serves there; stop it first")
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("look whether another process serves there: %w", reasonOf(err))
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the socket that a process left: %w", reasonOf(err))
	}
	return nil
}

// reasonOf is an error of the system without the path, which is the operator's value.
func reasonOf(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
