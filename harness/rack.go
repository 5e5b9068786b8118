package harness

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/moby/sys/mountinfo"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// StartTimeout is the time in which a started program has to serve.
const StartTimeout = 30 * time.Second

// RackOptions configures a simulated rack. The zero value has hot-plug and the instances a and b.
type RackOptions struct {
	Instances []string
	// Hotplug selects whether the rack attaches and detaches disks of running instances. "" means
	// adminapi.HotplugFull. Current racks have adminapi.HotplugNone.
	Hotplug adminapi.Hotplug
	// TLS makes the rack serve HTTPS. Then Rack.CA is the PEM file with the authority's certificate.
	TLS bool
	// QuotaBytes and DiskLimit replace the simulator's defaults if they are not zero.
	QuotaBytes int64
	DiskLimit  int
	Args       []string
}

// Rack is a simulated rack: an oxide-simulator process, its directory, and clients of its APIs.
type Rack struct {
	// Dir contains the rack's files, and its plugins' directories and mount points.
	Dir string
	// URL, Project and Token are the driver's settings. CA is a PEM file if the rack serves TLS.
	URL, Project, Token, CA string
	Instances               []Instance
	Admin                   adminapi.Client
	// History records calls to the drivers, and when the rack and the drivers started or ended.
	History *history.Recorder
	Administrator

	run     *Run
	options RackOptions
	listen  []string
	*process
	plugs atomic.Int64
}

// Instance is an instance of the rack. Guest is the directory with its /sys and /dev (guest view).
type Instance struct {
	Name  string `json:"name"`
	ID    string `json:"id"`
	Guest string `json:"guest"`
}

// StartRack starts a simulated rack in a new directory.
func (r *Run) StartRack(ctx context.Context, options RackOptions) (rack *Rack, err error) {
	defer Catch(&err)
	if options.Instances == nil {
		options.Instances = []string{"a", "b"}
	}
	dir := Got(r.newDir(r.Dir, "rack-", &r.racks))
	Must(identify(filepath.Join(dir, "sim")))
	rack = &Rack{Dir: dir, Project: "sanity", Token: TokenPrefix + uuid.NewString(),
		History: &history.Recorder{}, run: r, options: options,
		listen: []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}}
	return rack, rack.Start(ctx)
}

// identify writes this process's identity into a rack's directory. The simulator writes the
// identity into its loop devices. So if this run is killed before it stops the rack, the next run
// can find and detach the loop devices.
func identify(dir string) error {
	process := loopdev.Process()
	if process == "" {
		return nil // the simulator makes an identity
	}
	return errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "identity"),
		[]byte(process+"."+rand.Text()[:8]), 0o600))
}

// Start starts the simulator. After Stop or Kill, it keeps the earlier records and address.
func (r *Rack) Start(ctx context.Context) (err error) {
	defer Catch(&err)
	command := slices.Concat(Got(r.run.command(ctx, "oxide-simulator")), r.args())
	r.process = Got(startProcess("oxide-simulator", r.LogFile(), command, nil))
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	line, err := r.firstLine(ctx)
	if err == nil {
		err = r.connect(line)
	}
	if err != nil {
		r.kill()
		return fmt.Errorf("start a rack: %w", err)
	}
	r.History.Mark(history.Rack, "started")
	return nil
}

func (r *Rack) args() []string {
	o := r.options
	// No test uses a rack after a power cut of this machine, so --volatile skips syncs.
	args := append([]string{"serve", "--dir", filepath.Join(r.Dir, "sim"), "--disks=file",
		"--flight-records", filepath.Join(r.Dir, pluginPrefix+"*", flightDir),
		"--project", r.Project, "--token", r.Token, "--volatile",
		"--hotplug=" + cmp.Or(string(o.Hotplug), string(adminapi.HotplugFull)),
		fmt.Sprint("--tls=", o.TLS)}, r.listen...)
	for _, name := range o.Instances {
		args = append(args, "--instance", name)
	}
	if o.QuotaBytes != 0 {
		args = append(args, "--quota", strconv.FormatInt(o.QuotaBytes, 10))
	}
	if o.DiskLimit != 0 {
		args = append(args, "--disk-limit", strconv.Itoa(o.DiskLimit))
	}
	return append(args, o.Args...)
}

func (r *Rack) connect(line string) (err error) {
	defer Catch(&err)
	var address struct {
		URL, Admin, CA string
		Instances      []Instance
	}
	if err := json.Unmarshal([]byte(line), &address); err != nil {
		return fmt.Errorf("the simulator's first line is not its documented JSON: %w: %q", err, line)
	}
	if len(address.Instances) != len(r.options.Instances) {
		return fmt.Errorf("the simulator has %d instances, want %d: %s",
			len(address.Instances), len(r.options.Instances), line)
	}
	r.URL, r.CA, r.Instances = address.URL, address.CA, address.Instances
	r.Admin = adminapi.Client{URL: address.Admin}
	r.listen = nil
	for flag, text := range map[string]string{"--listen": address.URL, "--admin": address.Admin} {
		u, err := url.Parse(text)
		Must(Wrap(err, "the simulator's %s address", flag))
		r.listen = append(r.listen, flag, u.Host)
	}
	// This client keeps no idle connections. A [Ledger] would count them as the simulator's files.
	r.Client, err = oxide.NewClient(oxide.WithHost(r.URL), oxide.WithToken(r.Token),
		oxide.WithHTTPClient(&http.Client{Transport: Got(Transport(r.CA)), Timeout: time.Minute}))
	return err
}

// Transport returns an HTTP transport to a rack. It closes each connection after one request. If
// caFile is not empty, it trusts the certificate authority in this PEM file.
func Transport(caFile string) (*http.Transport, error) {
	transport := &http.Transport{DisableKeepAlives: true, Proxy: http.ProxyFromEnvironment}
	if caFile == "" {
		return transport, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("read the rack's CA certificate: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s contains no PEM certificate", caFile)
	}
	transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	return transport, nil
}

// Instance returns the instance with this name, or the first one if name is empty.
func (r *Rack) Instance(name string) Instance {
	i := slices.IndexFunc(r.Instances, func(i Instance) bool { return name == "" || i.Name == name })
	if i < 0 {
		panic(fmt.Sprintf("this rack has no instance %q; name it in RackOptions.Instances", name))
	}
	return r.Instances[i]
}

// Port returns the port of the rack's Oxide API.
func (r *Rack) Port() uint16 { return netPort(r.URL) }

// LogFile returns the path of the log of the simulator.
func (r *Rack) LogFile() string { return filepath.Join(r.Dir, "simulator.log") }

// Stop ends the simulator with SIGTERM. It returns an error if the simulator fails, or leaves a
// process, a mount or a loop device.
func (r *Rack) Stop() error {
	err := errors.Join(r.stop(), r.nothingLeft())
	if err != nil {
		r.run.Failed()
	}
	return err
}

// Terminate ends the simulator with SIGTERM while guests may use disks. It returns the simulator's
// error, which names the disks that are not detached. Start attaches all disks to new loop devices.
func (r *Rack) Terminate() error {
	r.History.Mark(history.Rack, "stopped")
	return r.stop()
}

// Kill ends the simulator with SIGKILL. Its loop devices remain, and Start uses them again.
func (r *Rack) Kill() {
	if r.Running() {
		r.History.Mark(history.Rack, "killed")
	}
	r.kill()
}

// GuestDevice is a disk in a guest view. Number is "major:minor", and Path the device node's path.
type GuestDevice struct{ Name, Serial, Number, Path string }

// Devices returns the disks in the guest view. It skips a disk that disappears during the call.
func (i Instance) Devices() (devices []GuestDevice, err error) {
	defer Catch(&err)
	for _, e := range Got(os.ReadDir(filepath.Join(i.Guest, "sys/block"))) {
		dir := filepath.Join(i.Guest, "sys/block", e.Name())
		serial, err1 := os.ReadFile(filepath.Join(dir, "device/serial"))
		number, err2 := os.ReadFile(filepath.Join(dir, "dev"))
		if err1 == nil && err2 == nil {
			devices = append(devices, GuestDevice{e.Name(), string(bytes.Trim(serial, "\x00 \n")),
				string(bytes.TrimSpace(number)), filepath.Join(i.Guest, "dev", e.Name())})
		}
	}
	return devices, nil
}

// Device returns the only disk in the guest view whose serial is the beginning of diskName.
func (i Instance) Device(diskName string) (device GuestDevice, err error) {
	defer Catch(&err)
	serial := diskName[:min(len(diskName), 20)]
	found := slices.DeleteFunc(Got(i.Devices()),
		func(d GuestDevice) bool { return d.Serial != serial })
	if len(found) != 1 {
		return device, fmt.Errorf("instance %s has %d devices with serial %q", i.Name, len(found), serial)
	}
	_, err = os.Stat(found[0].Path)
	return found[0], err
}

// MountsAt returns the mounts at a path in this mount namespace, from the lowest to the highest.
func MountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		return info.Mountpoint != path, false
	})
}

// Environment is a rack with its drivers. Baseline is a ledger from before the test.
type Environment struct {
	Rack     *Rack
	Plugins  []*Plugin
	Baseline Ledger
}

// StartEnvironment starts a rack without a driver.
func (r *Run) StartEnvironment(ctx context.Context, options RackOptions) (*Environment, error) {
	rack, err := r.StartRack(ctx, options)
	return &Environment{Rack: rack}, err
}

// StartPlugin starts a driver on the rack and waits until it is ready.
func (e *Environment) StartPlugin(ctx context.Context, options PluginOptions) (*Plugin, error) {
	plugin, err := e.Rack.StartPlugin(ctx, options)
	if err != nil {
		return plugin, err
	}
	e.Plugins = append(e.Plugins, plugin)
	return plugin, plugin.AwaitReady(ctx)
}

// StartNodes starts a node driver in each instance. The keys of nodes are the instances' names.
func (e *Environment) StartNodes(ctx context.Context, options PluginOptions) (
	nodes map[string]*Plugin, err error) {
	defer Catch(&err)
	options.Mode = ModeNode
	nodes = map[string]*Plugin{}
	for _, instance := range e.Rack.Instances {
		options.Instance = instance.Name
		nodes[instance.Name] = Got(e.StartPlugin(ctx, options))
	}
	return nodes, nil
}

// TakeBaseline sets Baseline to a new ledger.
func (e *Environment) TakeBaseline(ctx context.Context) (err error) {
	e.Baseline, err = e.Rack.Ledger(ctx, e.Plugins...)
	return err
}

// Balance waits until nothing has leaked since the baseline. See Rack.Balance.
func (e *Environment) Balance(ctx context.Context) error {
	return e.Rack.Balance(ctx, e.Baseline, e.Plugins...)
}

// Compare compares a new ledger with the baseline once. Unlike Balance, it ends no process.
func (e *Environment) Compare(ctx context.Context) error {
	return e.Rack.compare(ctx, e.Baseline, e.Plugins...)
}

// Close stops the drivers and the rack. It fails if one of them fails or leaves something behind.
func (e *Environment) Close() (err error) {
	for _, plugin := range e.Plugins {
		err = errors.Join(err, plugin.Stop())
	}
	if e.Rack != nil && e.Rack.Running() {
		err = errors.Join(err, e.Rack.Stop())
	}
	return err
}
