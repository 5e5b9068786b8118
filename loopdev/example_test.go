//go:build linux

package loopdev_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// backing makes a sparse file of 64 MiB.
func backing() (path string, remove func()) {
	dir, err := os.MkdirTemp("", "loopdev-example-")
	if err != nil {
		log.Fatal(err)
	}
	path = filepath.Join(dir, "disk.img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		log.Fatal(err)
	}
	if err := os.Truncate(path, 64<<20); err != nil {
		log.Fatal(err)
	}
	return path, func() { os.RemoveAll(dir) }
}

// Example attaches a loop device with a serial to a file, and detaches it.
func Example() {
	ctx := context.Background()
	path, remove := backing()
	defer remove()

	d, err := loopdev.Attach(ctx, loopdev.Config{
		Path:      path,
		Serial:    "example-0001",
		BlockSize: 4096,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(d.Serial, d.SizeBytes>>20, "MiB in blocks of", d.BlockSize)
	if err := d.Detach(ctx); err != nil {
		fmt.Println(err)
		return
	}
	// Output: example-0001 64 MiB in blocks of 4096
}

// ExampleFind shows how a program that was restarted finds its device by the serial. If there
// are two, the program has to decide between them.
func ExampleFind() {
	ctx := context.Background()
	path, remove := backing()
	defer remove()
	serial := fmt.Sprintf("example-%d", os.Getpid())
	if _, err := loopdev.Attach(ctx, loopdev.Config{Path: path, Serial: serial}); err != nil {
		fmt.Println(err)
		return
	}

	found, err := loopdev.Find(serial)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, d := range found {
		fmt.Println(d.BackingFile == path, d.Detach(ctx))
	}
	// Output: true <nil>
}

// ExampleDevice_Grow grows the file first, and then its device.
func ExampleDevice_Grow() {
	ctx := context.Background()
	path, remove := backing()
	defer remove()
	serial := fmt.Sprintf("example-%d", os.Getpid())
	d, err := loopdev.Attach(ctx, loopdev.Config{Path: path, Serial: serial})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { fmt.Println(d.Detach(ctx)) }()

	if err := os.Truncate(path, 128<<20); err != nil {
		fmt.Println(err)
		return
	}
	if err := d.Grow(); err != nil {
		fmt.Println(err)
		return
	}
	found, err := loopdev.Find(serial)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(found[0].SizeBytes>>20, "MiB")
	// Output:
	// 128 MiB
	// <nil>
}
