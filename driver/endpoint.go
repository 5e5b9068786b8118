package driver

import (
	"context"
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

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// socketMode gives access to the socket's owner and group: kubelet and the sidecars.
const socketMode = 0o660

// socketPath parses an endpoint. CSI allows only Unix sockets, with a name that ends in .sock.
func socketPath(endpoint string) (string, error) {
	expected := errors.New("has to be unix:///path/name.sock, an absolute path after three slashes")
	u, err := url.Parse(endpoint)
	switch {
	case err != nil, u.Scheme != "unix", u.Host != "", u.Opaque != "", u.User != nil,
		u.RawQuery != "", u.Fragment != "", !filepath.IsAbs(u.Path):
		return "", expected
	case !strings.HasPrefix(endpoint, "unix:///"):
		return "", expected
	case !strings.HasSuffix(u.Path, ".sock"):
		return "", errors.New("has to end in .sock, such as unix:///path/csi.sock, so that no other " +
			"file is taken for a socket")
	}
	path := filepath.Clean(u.Path)
	// The kernel's sun_path has 108 bytes with its NUL.
	if len(path) > 107 {
		return "", fmt.Errorf("has a path of %d bytes; a socket's has at most 107", len(path))
	}
	return path, nil
}

// listenEndpoint creates the socket of an endpoint.
func listenEndpoint(endpoint string) (net.Listener, error) {
	path, err := socketPath(endpoint)
	if err != nil {
		return nil, err
	}
	return listenUnix(path)
}

// listenUnix creates the socket, and nothing else in its directory, which belongs to the
// supervisor. It removes a socket left by a process that was killed, but not one that answers, or
// any other file.
func listenUnix(path string) (net.Listener, error) {
	unlock, err := lockDirectory(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	// The umask creates the socket with its final mode, so that it is never accessible to others.
	// Serving has not begun, so no other goroutine creates files meanwhile.
	old := syscall.Umask(0o777 &^ socketMode)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	syscall.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("create the socket: %w", csierr.WithoutPath(err))
	}
	listener.SetUnlinkOnClose(false)
	info, err := os.Lstat(path)
	if err != nil {
		_ = listener.Close()
		return nil, fmt.Errorf("stat the socket: %w", csierr.WithoutPath(err))
	}
	return &ownSocket{UnixListener: listener, path: path, info: info}, nil
}

// ownSocket removes its file when it is closed, but not the file of a process that replaced it.
type ownSocket struct {
	*net.UnixListener
	path string
	info os.FileInfo
}

// Close stops listening. While the socket is open no other file can have its inode number.
func (s *ownSocket) Close() error {
	if unlock, err := lockDirectory(filepath.Dir(s.path)); err == nil {
		defer unlock()
		if info, err := os.Lstat(s.path); err == nil && os.SameFile(info, s.info) {
			_ = os.Remove(s.path)
		}
	}
	return s.UnixListener.Close()
}

// lockDirectory keeps other processes of the driver from creating or removing a socket in dir until
// unlock is called: two that start at once would each treat the other's new socket as stale. The
// lock is on the directory itself and leaves no file in it.
func lockDirectory(dir string) (unlock func(), err error) {
	const maxWait = 2 * time.Second
	held, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil, errors.New("the socket's directory does not exist; the supervisor has to create it")
	case err != nil:
		return nil, fmt.Errorf("open the socket's directory: %w", csierr.WithoutPath(err))
	}
	// flock(2) has no time limit of its own.
	backoff := async.Backoff{Pause: 5 * time.Millisecond, Max: 5 * time.Millisecond,
		End: time.Now().Add(maxWait)}
	for {
		err := syscall.Flock(int(held.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = held.Close() }, nil
		case !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR):
			_ = held.Close()
			return nil, fmt.Errorf("lock the socket's directory: %w", err)
		}
		if again, _ := backoff.Wait(context.Background()); !again {
			_ = held.Close()
			return nil, fmt.Errorf("another process has been starting there for %s; stop it first",
				maxWait)
		}
	}
}

func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("stat an old socket: %w", csierr.WithoutPath(err))
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is no socket exists at the socket's path; remove it")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		_ = conn.Close()
		return errors.New("another process serves there; stop it first")
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("check whether another process serves there: %w", csierr.WithoutPath(err))
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove a stale socket: %w", csierr.WithoutPath(err))
	}
	return nil
}
