// Package guest works inside an instance of the rack. It runs the driver's node service there,
// and writes and verifies the content of volumes.
//
// An [Agent] does the work. [Here] starts one in this process. [Connect] copies this program into
// another instance, through a command such as "ssh b", and starts it there as an agent that
// serves its standard streams ([Serve]). Both return an [AgentClient]:
//
//	here, err := guest.Here(ctx, config)
//	there, err := guest.Connect(ctx, []string{"ssh", "b"}, config)
//	…  csi.NewNodeClient(there).NodeStageVolume(ctx, …)
//	…  there.Write(ctx, guest.Writing{Place: place, Pattern: pattern, Sync: true})
//	report, err := there.Verify(ctx, place, pattern)
//
// # What is written
//
// A [Pattern] is a row of [BlockBytes] blocks. Each block contains its number, its generation,
// its owner's seed and a checksum. So the content at the place of a block identifies the error:
// zeros, another generation, another block, a block of another volume, or garbage ([Finding]). A
// writer ([AgentClient.StartWriter]) appends such blocks one by one and counts those that fsync
// acknowledged. Reads bypass the page cache (O_DIRECT), so that the data comes from the disk.
//
// # What is left behind
//
// Nothing. An agent keeps its files in a tmpfs of its own mount namespace, and the driver dies
// with it. However the agent ends, its mounts are gone when its last process is. The program that
// calls Here must itself run in such a namespace (package namespace). Only an agent that is
// killed leaves an empty directory, which the next agent there removes.
//
// The package needs Linux and root. On other systems it builds, and Here and Serve fail.
package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Config configures the driver in an instance. A zero field keeps the driver's default.
type Config struct {
	// Plugin is the command that starts the driver, such as {"/proc/self/exe", "plugin"}: a path in
	// the instance, and an argument before the driver's own.
	Plugin []string
	// Args are further arguments of the driver.
	Args []string
	// SysfsRoot and DevRoot are the directories of the guest's sysfs and device nodes. When empty,
	// the agent reads them from its environment (OXIDE_SYSFS_ROOT, OXIDE_DEV_ROOT), with /sys and
	// /dev as defaults.
	SysfsRoot, DevRoot string
}

// Agent does the work inside an instance. Here and Serve create one, and an AgentClient calls it.
type Agent struct {
	// dir is a tmpfs that contains everything that the agent creates.
	dir *directory
	// calls is locked by calls of the node service, and locked for reading by the agent's own.
	calls sync.RWMutex

	mu sync.Mutex
	// mu guards the fields below.
	config  Config
	plugin  *harness.Plugin
	writers map[int]*writer
}

// newAgent creates an agent. The process must be in a mount namespace of its own.
func newAgent() (*Agent, error) {
	dir, err := newDirectory()
	if err != nil {
		return nil, err
	}
	return &Agent{dir: dir, writers: map[int]*writer{}}, nil
}

// dirPrefix begins the names of the directories that an agent works in or was copied to.
const dirPrefix = "oxide-guest-"

// Start starts the driver's node service, once, and returns the agent's directory.
func (a *Agent) Start(ctx context.Context, c Config) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.plugin != nil {
		return "", errors.New("the driver runs in this instance already")
	}
	for _, root := range []struct {
		value            *string
		variable, preset string
	}{{&c.SysfsRoot, "OXIDE_SYSFS_ROOT", "/sys"}, {&c.DevRoot, "OXIDE_DEV_ROOT", "/dev"}} {
		if *root.value == "" {
			*root.value = os.Getenv(root.variable)
		}
		if *root.value == "" {
			*root.value = root.preset
		}
	}
	a.config = c
	if len(c.Plugin) == 0 {
		return a.dir.path, nil
	}
	run := &harness.Run{Dir: a.dir.path, Progress: io.Discard}
	plugin, err := run.StartPlugin(ctx, harness.PluginOptions{
		Mode: harness.ModeNode, Command: c.Plugin, Args: c.Args,
		Env:   map[string]string{"OXIDE_SYSFS_ROOT": c.SysfsRoot, "OXIDE_DEV_ROOT": c.DevRoot},
		Files: []*os.File{a.dir.lock},
	})
	if err != nil {
		return "", fmt.Errorf("start the driver's node service: %w", err)
	}
	a.plugin = plugin
	return a.dir.path, nil
}

// MakeDirs makes directories below the agent's own, as an orchestrator does.
func (a *Agent) MakeDirs(_ context.Context, paths []string) (Nothing, error) {
	for _, path := range paths {
		if err := os.MkdirAll(path, 0o750); err != nil {
			return Nothing{}, fmt.Errorf("make a directory in the instance: %w", err)
		}
	}
	return Nothing{}, nil
}

// Close ends what the agent started and removes its directory. If volumes are still mounted, it
// unmounts them and returns an error that names them.
func (a *Agent) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.writers {
		w.stop()
	}
	var errs []error
	if a.plugin != nil {
		errs = append(errs, a.plugin.Stop())
	}
	return errors.Join(append(errs, a.dir.remove())...)
}

// device finds the device with a device number in the guest's sysfs.
func (a *Agent) device(number string) (Device, error) {
	a.mu.Lock()
	root := a.config.SysfsRoot
	a.mu.Unlock()
	devices, err := Devices(root)
	if err != nil {
		return Device{}, err
	}
	for _, d := range devices {
		if d.Number == number {
			return d, nil
		}
	}
	return Device{}, fmt.Errorf("the guest has no block device %s in %s",
		number, filepath.Join(root, "block"))
}

// open opens the place of a volume. If the volume is raw, it first compares the serial of the
// device.
func (a *Agent) open(place Place, open func(string) (*os.File, error)) (*os.File, error) {
	file, err := open(place.Path)
	if err != nil || !place.Raw() {
		return file, err
	}
	if err := a.ownDevice(file, place.Serial); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

func (a *Agent) ownDevice(file *os.File, serial string) error {
	number, err := deviceNumber(file)
	if err != nil {
		return err
	}
	d, err := a.device(number)
	if err == nil && d.Serial != serial {
		err = fmt.Errorf("%s shows the device %s with the serial %q, not the volume's, %q",
			file.Name(), d.Name, d.Serial, serial)
	}
	return err
}
