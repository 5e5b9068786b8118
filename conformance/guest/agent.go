// Package guest works inside an instance of the rack. It runs the driver's node service there, and
// writes and verifies the content of volumes.
//
// An [Agent] does the work. [Here] starts one in this process. [Connect] copies this program into
// another instance, through a command such as "ssh b", and starts it there as an agent that is
// called through its standard streams ([Main]). Both return an [AgentClient]:
//
//	here, err := guest.Here(ctx, config)
//	there, err := guest.Connect(ctx, []string{"ssh", "b"}, config)
//	…  csi.NewNodeClient(there).NodeStageVolume(ctx, …)
//	…  guest.Write(ctx, there, guest.Task{Place: place, Pattern: pattern, Sync: true})
//	report, err := guest.Verify(ctx, there, guest.Task{Place: place, Pattern: pattern})
//
// # What is written
//
// A [Pattern] is a sequence of blocks of [BlockBytes] each. A block contains its number, its
// generation, the seed of its volume and a checksum. So a wrong block shows what happened: it is
// zero, has another generation or another number, belongs to another volume, or is garbage
// ([Finding]). A writer ([StartWriter]) writes such blocks one by one and counts those that fsync
// acknowledged. Reads bypass the page cache (O_DIRECT), so that the data comes from the disk.
//
// # What is left behind
//
// An agent keeps its files in a tmpfs of its own mount namespace, and the driver dies with the
// agent. The kernel removes the mounts with the last process of the mount namespace. So only an
// empty directory is left of a killed agent, and the next agent on that machine removes it. The
// program that calls [Here] must itself run in a mount namespace of its own (package namespace).
//
// The package needs Linux and root. On other systems it can be built, but [Here] and [Main] fail.
package guest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// Config configures the driver in an instance.
type Config struct {
	// Plugin is the command that starts the driver in the instance, such as {"/proc/self/exe",
	// "plugin"}. If Plugin is empty, no driver runs.
	Plugin []string
	Args   []string
	// If SysfsRoot or DevRoot is empty, the agent uses OXIDE_SYSFS_ROOT or OXIDE_DEV_ROOT of its
	// environment. If that is empty, too, it uses /sys or /dev.
	SysfsRoot, DevRoot string
}

// Agent works inside an instance. An AgentClient calls it.
type Agent struct {
	// dir is a tmpfs that contains everything that the agent creates.
	dir *directory
	// Calls of the agent's own methods acquire 1 each, so they run concurrently. A call of the node
	// service acquires allCalls, so it runs alone.
	calls *semaphore.Weighted

	// The method Start sets config and plugin before any other call.
	config Config
	plugin *harness.Plugin

	mu sync.Mutex
	// mu guards writers.
	writers map[int]*writer
}

func newAgent() (*Agent, error) {
	dir, err := newDirectory()
	return &Agent{dir: dir, writers: map[int]*writer{}, calls: semaphore.NewWeighted(allCalls)}, err
}

const allCalls = 1 << 30

// dirPrefix begins the name of a directory of an agent or of a copied program.
const dirPrefix = "oxide-guest-"

// Start starts the driver's node service and returns the agent's directory. Call it once.
func (a *Agent) Start(ctx context.Context, c Config) (string, error) {
	c.SysfsRoot = cmp.Or(c.SysfsRoot, os.Getenv("OXIDE_SYSFS_ROOT"), "/sys")
	c.DevRoot = cmp.Or(c.DevRoot, os.Getenv("OXIDE_DEV_ROOT"), "/dev")
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

// MakeDirs makes directories, whose paths must be below the agent's directory.
func (a *Agent) MakeDirs(_ context.Context, paths []string) (none Nothing, err error) {
	defer harness.Catch(&err)
	for _, path := range paths {
		harness.Must(harness.Wrap(os.MkdirAll(path, 0o750), "make a directory in the instance"))
	}
	return none, nil
}

// Close ends what the agent started and removes the agent's directory. If volumes are still
// mounted, Close unmounts them and returns an error that names them. All calls must have ended.
func (a *Agent) Close() (err error) {
	for _, w := range a.writers {
		w.stop()
	}
	if a.plugin != nil {
		err = a.plugin.Stop()
	}
	return errors.Join(err, a.dir.remove())
}

func (a *Agent) open(place Place, open func(Place) (*os.File, error)) (*os.File, error) {
	file, err := open(place)
	if err != nil || !place.Raw() {
		return file, err
	}
	return harness.Opened(file, a.ownDevice(file, place.Serial))
}

func (a *Agent) ownDevice(file *os.File, serial string) (err error) {
	defer harness.Catch(&err)
	root := a.config.SysfsRoot
	number, devices := harness.Got(harness.DeviceNumber(file)), harness.Got(Devices(root))
	switch i := slices.IndexFunc(devices, func(d Device) bool { return d.Number == number }); {
	case i < 0:
		return fmt.Errorf("the guest has no block device %s in %s", number, filepath.Join(root, "block"))
	case devices[i].Serial != serial:
		return fmt.Errorf("%s shows the device %s with the serial %q, not the volume's, %q",
			file.Name(), devices[i].Name, devices[i].Serial, serial)
	}
	return nil
}

const greeting = "oxide-guest agent 2"

// Main runs an agent until standard input ends, and returns the exit status. An AgentClient calls
// the agent through standard input and output. Main starts the program again with the same
// arguments, in a mount namespace of its own, and the program must call Main both times. Main
// removes the copy of the program that Connect made.
func Main(ctx context.Context) int {
	err := func() (err error) {
		defer harness.Catch(&err)
		if !namespace.Entered() {
			removeCopy()
		}
		harness.Must(namespace.Enter())
		agent := harness.Got(newAgent())
		if _, err = fmt.Println(greeting); err == nil {
			agent.serve(ctx, newStreams(os.Stdin, os.Stdout, io.NopCloser(nil)))
		}
		return errors.Join(err, agent.Close())
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		return 1
	}
	return 0
}

// removeCopy removes this program's file, which the running process does not need, if Connect
// copied it here. Like harness.Must, it panics on an error.
func removeCopy() {
	dir := filepath.Dir(harness.Got(os.Executable()))
	if !strings.HasPrefix(filepath.Base(dir), dirPrefix) {
		return
	}
	if err := RemoveOwn(dir, copyMark); !errors.Is(err, ErrNotOwn) { // else Connect did not make it
		harness.Must(err)
	}
}

const agentService = "/oxide.Agent/"

// methods has the agent's own gRPC methods. Arguments and results are in JSON.
var methods = map[string]func(ctx context.Context, a *Agent, args []byte) (any, error){}

// Each of these functions calls a method of Agent through an AgentClient.
var (
	startAgent      = method("Start", (*Agent).Start)
	ReadFacts       = method("Facts", (*Agent).Facts)
	MakeDirs        = method("MakeDirs", (*Agent).MakeDirs)
	Write           = method("Write", (*Agent).Write)
	Verify          = method("Verify", (*Agent).Verify)
	ScanDevice      = method("Scan", (*Agent).Scan)
	FilesystemBytes = method("FilesystemBytes", (*Agent).FilesystemBytes)
	StartWriter     = method("StartWriter", (*Agent).StartWriter)
	Acknowledged    = method("Acknowledged", (*Agent).Acknowledged)
	StopWriter      = method("StopWriter", (*Agent).StopWriter)
)

// method adds a method of Agent to the map "methods", and returns the function that calls it.
func method[In, Out any](name string, run func(*Agent, context.Context, In) (Out, error)) func(
	context.Context, *AgentClient, In) (Out, error) {
	name = agentService + name
	methods[name] = func(ctx context.Context, a *Agent, message []byte) (any, error) {
		var args In
		if err := json.Unmarshal(message, &args); err != nil {
			return nil, err
		}
		return run(a, ctx, args)
	}
	return func(ctx context.Context, g *AgentClient, args In) (out Out, err error) {
		if err = g.call(ctx, name, args, &out); err != nil {
			err = fmt.Errorf("in %s: %w", g.Name, err)
		}
		return out, err
	}
}

func (a *Agent) serve(ctx context.Context, conn *streams) {
	server := grpc.NewServer(grpc.ForceServerCodec(codec{}), grpc.WaitForHandlers(true),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			calling, cancel := context.WithCancel(stream.Context())
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			method, _ := grpc.MethodFromServerStream(stream) // every stream of a server has one
			var message []byte
			if err := stream.RecvMsg(&message); err != nil {
				return err
			}
			answer, err := a.call(calling, method, message)
			if err != nil {
				return err
			}
			return stream.SendMsg(answer)
		}))
	_ = server.Serve(conn) // returns an error at the end of the connection
	server.Stop()
}

func (a *Agent) call(ctx context.Context, name string, message []byte) (any, error) {
	if !strings.HasPrefix(name, agentService) {
		// Wait for the agent's own calls: a canceled one may still use the volume of this call.
		if err := a.calls.Acquire(ctx, allCalls); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		defer a.calls.Release(allCalls)
		if a.plugin == nil {
			return nil, status.Error(codes.Internal,
				"no driver runs in this instance: Config.Plugin was empty")
		}
		var answer []byte
		err := a.plugin.Conn.Invoke(ctx, name, message, &answer, grpc.ForceCodec(codec{}))
		return answer, err
	}
	if err := a.calls.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer a.calls.Release(1)
	run := methods[name]
	if run == nil {
		return nil, fmt.Errorf("this agent has no call %s: is it of another release?", name)
	}
	return run(ctx, a, message)
}

type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) ([]byte, error) {
	if message, is := v.([]byte); is {
		return message, nil
	}
	return json.Marshal(v)
}

func (codec) Unmarshal(data []byte, v any) error {
	if message, is := v.(*[]byte); is {
		*message = bytes.Clone(data)
		return nil
	}
	return json.Unmarshal(data, v)
}

// streams is a connection over two streams. It is also the listener that accepts this connection.
type streams struct {
	net.Conn // has the methods that streams lack, such as SetDeadline, which have no effect
	in       io.Reader
	out      io.Writer
	end      func() error
	open     context.Context // ends when the connection is closed
	accept   sync.Once
}

func newStreams(in io.Reader, out io.Writer, end io.Closer) *streams {
	pipe, _ := net.Pipe()
	open, closed := context.WithCancel(context.Background())
	return &streams{Conn: pipe, in: in, out: out, open: open, end: sync.OnceValue(func() error {
		closed()
		return end.Close()
	})}
}

func (s *streams) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *streams) Write(p []byte) (int, error) { return s.out.Write(p) }
func (s *streams) Close() error                { return s.end() }
func (s *streams) Addr() net.Addr              { return s.LocalAddr() }

// Accept returns the connection once. Later calls wait until the connection is closed.
func (s *streams) Accept() (conn net.Conn, err error) {
	s.accept.Do(func() { conn = s })
	if conn == nil {
		<-s.open.Done()
		return nil, io.EOF
	}
	return conn, nil
}

// Nothing stands for no argument or no result.
type Nothing struct{}

// Facts describes an instance, as seen from inside.
type Facts struct {
	// InstanceID is the ID that the firmware reports by SMBIOS.
	InstanceID string
	Devices    []Device
}

// Device is a block device in the guest's sysfs.
type Device struct {
	// Number is the device number, as major:minor.
	Name, Number, Serial string
	SizeBytes, BlockSize int64
}

// With returns the devices that have this serial.
func (f Facts) With(serial string) []Device {
	return slices.DeleteFunc(slices.Clone(f.Devices),
		func(d Device) bool { return d.Serial != serial })
}

// Open opens the device for reading, and checks that the device node has the device's number.
func (d Device) Open(devRoot string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(devRoot, d.Name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	number, err := harness.DeviceNumber(file)
	if err == nil && number != d.Number {
		err = fmt.Errorf("%s is the device %s, expected %s", file.Name(), number, d.Number)
	}
	return harness.Opened(file, err)
}

// Facts reads the instance's ID and devices.
func (a *Agent) Facts(context.Context, Nothing) (Facts, error) {
	id, _, errID := Firmware(a.config.SysfsRoot)
	if errors.Is(errID, fs.ErrNotExist) {
		errID = nil // the machine has no SMBIOS
	}
	devices, err := Devices(a.config.SysfsRoot)
	return Facts{id, devices}, errors.Join(errID, err)
}

// Firmware reads an instance's ID and its firmware's vendor from sysfs.
func Firmware(sysfsRoot string) (instanceID, vendor string, err error) {
	dmi := filepath.Join(sysfsRoot, "class", "dmi", "id")
	instanceID, errID := attribute(dmi, "product_serial")
	vendor, errVendor := attribute(dmi, "sys_vendor")
	return strings.ToLower(instanceID), vendor, errors.Join(errID, errVendor)
}

// Devices returns the block devices with a serial. It skips those that disappear meanwhile.
func Devices(sysfsRoot string) (devices []Device, err error) {
	defer harness.Catch(&err)
	for _, dir := range harness.Got(filepath.Glob(filepath.Join(sysfsRoot, "block", "*"))) {
		d, err := blockDevice(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		harness.Must(harness.Wrap(err, "read the block device %s", filepath.Base(dir)))
		devices = append(devices, d)
	}
	return devices, nil
}

func blockDevice(dir string) (d Device, err error) {
	defer harness.Catch(&err)
	text := func(name string) string { return harness.Got(attribute(dir, name)) }
	number := func(name string) int64 { return harness.Got(strconv.ParseInt(text(name), 10, 64)) }
	return Device{Name: filepath.Base(dir), Number: text("dev"), Serial: text("device/serial"),
		SizeBytes: 512 * number("size"), BlockSize: number("queue/logical_block_size")}, nil
}

// attribute reads a file of sysfs without the NULs and spaces with which firmware pads the text.
func attribute(dir, name string) (string, error) {
	text, err := ReadFile(filepath.Join(dir, name))
	return strings.Trim(string(text), "\x00 \n"), err
}

// markFile is a file in each directory that this program makes. It contains the directory's
// purpose.
const markFile = ".oxide-conformance"

// ErrNotOwn means that nothing proves that this program made a directory.
var ErrNotOwn = errors.New("nothing proves that this program made it, so it was left")

// MarkOwn writes a purpose into the markFile of a directory that this process has made.
func MarkOwn(dir, purpose string) error {
	file, err := os.OpenFile(filepath.Join(dir, markFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("mark a directory: %w", err)
	}
	_, err = fmt.Fprintln(file, purpose)
	return errors.Join(err, file.Close())
}

// RemoveOwn removes a directory with its content, if it exists. It refuses a link, a directory that
// another user owns or may write to, one without the mark of this purpose, and one with a mount
// below it.
func RemoveOwn(path, purpose string) (err error) {
	defer harness.Catch(&err)
	parent := harness.Got(os.OpenRoot(filepath.Dir(path)))
	defer parent.Close()
	name := filepath.Base(path)
	named, err := parent.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !named.IsDir() || !IsOwn(named) {
		return errors.Join(fmt.Errorf("%s: %w", path, ErrNotOwn), err)
	}
	dir := harness.Got(parent.OpenRoot(name))
	defer dir.Close()
	opened, errOpened := dir.Stat(".")
	mark, errMark := dir.Lstat(markFile)
	if err := errors.Join(errOpened, errMark); err != nil || !os.SameFile(named, opened) ||
		!mark.Mode().IsRegular() || !IsOwn(mark) {
		return fmt.Errorf("%s: %w: %w", path, ErrNotOwn, errors.Join(err, errors.New("no mark")))
	}
	if text, err := dir.ReadFile(markFile); err != nil || strings.TrimSpace(string(text)) != purpose {
		return errors.Join(fmt.Errorf("%s: %w: its mark is %.40q", path, ErrNotOwn, text), err)
	}
	mounts, err := harness.MountsBelow(path)
	if err != nil || len(mounts) > 0 {
		return errors.Join(fmt.Errorf("%s was left: mounted below it are %q", path, mounts), err)
	}
	entries, err := fs.ReadDir(dir.FS(), ".")
	for _, entry := range entries {
		if entry.Name() != markFile { // the mark is removed last, so that a second try is possible
			err = errors.Join(err, dir.RemoveAll(entry.Name()))
		}
	}
	harness.Must(err)
	return errors.Join(dir.Remove(markFile), parent.Remove(name))
}

// IsOwn reports whether a file belongs to this user and nobody else may write to it.
func IsOwn(info fs.FileInfo) bool {
	st, is := info.Sys().(*syscall.Stat_t)
	return is && int(st.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}

const maxFile = 16 << 20

// ReadFile reads a regular file. It never blocks on a FIFO or a device.
func ReadFile(path string) (_ []byte, err error) {
	defer harness.Catch(&err)
	file := harness.Got(os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0))
	defer file.Close()
	if info := harness.Got(file.Stat()); !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: expected a regular file; found %s", path, info.Mode())
	}
	return io.ReadAll(io.LimitReader(file, maxFile))
}
