package program

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const usage = `usage: oxide-simulator serve [--dir DIR] [flags]
       oxide-simulator --version

Serves a simulated Oxide rack. On Linux and as root its instances see their disks as devices;
elsewhere the disks are files only. When it is ready, it prints one line of JSON:
{"url":…,"admin":…,"project":…,"instances":[{"name":…,"id":…,"guest":DIR}]}
SIGTERM ends it and releases every device, unless --keep-devices is given. What was acknowledged
is in DIR. Without --dir the rack is gone when it ends, and what it prints is for a shell:
OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT.

`

const (
	diskFiles = "file"
	diskFUSE  = "fuse"
	diskNone  = "none"
	guestVM   = "vm"
)

type options struct {
	rack            simulator.Config
	listen, admin   string
	tls             bool
	tlsCert, tlsKey string
	tlsHosts        []string
	cert            tls.Certificate
	disks, guests   string
	image           string
	mutation        string
	flightRecords   []string
	// alone means that the user did not set --dir, so the rack has a temporary directory.
	alone     bool
	logLevel  slog.Level
	logFormat string
}

// parse parses the arguments. After it has printed the help, it returns nil options and no error.
func parse(args []string, stdout, stderr io.Writer) (*options, error) {
	o := &options{tlsHosts: []string{"localhost", "127.0.0.1", "::1"}}
	flags := o.flags()
	// Do not let the package flag print the whole usage after an error: the error is one line.
	flags.SetOutput(io.Discard)
	help := func() {
		flags.SetOutput(stdout)
		flags.Usage()
	}
	if len(args) == 0 || args[0] != "serve" {
		if len(args) > 0 && strings.TrimLeft(args[0], "-") == "help" {
			help()
			return nil, nil
		}
		return nil, errors.New(`the first argument must be "serve"; see oxide-simulator help`)
	}
	if err := flags.Parse(args[1:]); errors.Is(err, flag.ErrHelp) {
		help()
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("%w; see oxide-simulator help", err)
	}
	if err := o.check(flags.Args()); err != nil {
		return nil, err
	}
	o.choose()
	o.rack.Log = slog.New(o.logHandler(stderr))
	return o, nil
}

func (o *options) flags() *flag.FlagSet {
	f := flag.NewFlagSet("oxide-simulator serve", flag.ContinueOnError)
	f.Usage = func() {
		fmt.Fprint(f.Output(), usage)
		f.PrintDefaults()
	}
	r := &o.rack
	f.StringVar(&r.Dir, "dir", "", "the rack's `directory`, created if it is missing; default: a new "+
		"one, removed at the end")
	f.BoolVar(&r.Volatile, "volatile", false, "write faster: the rack survives a kill of the "+
		"simulator, but not a power cut of the machine")
	f.StringVar(&o.listen, "listen", "127.0.0.1:0", "`address` of the API; port 0 picks one")
	f.StringVar(&o.admin, "admin", "127.0.0.1:0", "`address` of the admin listener")
	f.Func("admin-host", "`name` by which clients reach the admin listener, beside localhost and its "+
		"IP addresses; repeatable", each(&r.AdminHosts))
	f.Func("api-host", "`name` by which clients reach the API, beside localhost, its IP addresses "+
		"and those of --tls-host; repeatable", each(&r.APIHosts))
	f.Func("project", "`name` of a project; repeatable, the first has the instances",
		each(&r.Projects))
	f.Func("instance", "`name[=uuid]` of an instance that runs from the start; repeatable",
		func(s string) error {
			name, id, _ := strings.Cut(s, "=")
			r.Instances = append(r.Instances, simulator.InstanceSpec{Name: name, ID: id})
			return nil
		})
	f.Func("image", "`[project/]name=size|file` of an image; without a project it is the silo's; "+
		"repeatable", o.addImage)
	f.StringVar(&r.Token, "token", "", "the only `token` accepted; default: any oxide-token-…")
	f.Func("token-ttl", "`time` after which the rack says that the token expires (default never)",
		func(s string) error {
			ttl, err := time.ParseDuration(s)
			r.TokenExpires = time.Now().Add(ttl)
			return err
		})
	f.Func("hotplug", "what the rack does with disks of running instances: `full` (default), "+
		"attach-only, or none as on\nracks of today; and, after commas, behaviours of the prototype: "+
		"record-first (an attach is recorded\nbefore the device appears, even if it never does), "+
		"refusals-500 (a refused attach is a 500),\nsurprise-removal (a guest can use a detached disk "+
		"for one more second)", func(s string) error {
		r.Hotplug = simulator.Hotplug(s)
		return r.Hotplug.Check()
	})
	o.limits(f)
	f.BoolVar(&o.tls, "tls", false, "serve HTTPS, with a certificate made in the directory")
	f.StringVar(&o.tlsCert, "tls-cert", "", "PEM `file` of a certificate to serve HTTPS with")
	f.StringVar(&o.tlsKey, "tls-key", "", "PEM `file` of its key")
	f.Func("tls-host", "further `name` or address in the certificate; repeatable",
		func(s string) error {
			o.tlsHosts, r.APIHosts = append(o.tlsHosts, s), append(r.APIHosts, s)
			return nil
		})
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	return f
}

func each(list *[]string) func(string) error {
	return func(s string) error {
		*list = append(*list, s)
		return nil
	}
}

func (o *options) limits(f *flag.FlagSet) {
	r := &o.rack
	f.StringVar(&o.disks, "disks", "", "what the guests' disks are: `file`; fuse, which can fail "+
		"(the admin listener's\nPOST /disks/ID/faults) and are gone when the simulator ends; or none: "+
		"no guest sees a disk\n(default file or, without Linux, root or loop devices, none)")
	f.StringVar(&o.guests, "guests", "", "what the instances are: `dir`, directories that look like "+
		"a guest's /sys\nand /dev (default), or vm: virtual machines, which need QEMU and an image")
	f.StringVar(&o.image, "vm-image", "", "`directory` of the virtual machines' image, which make "+
		"vm-image makes (default\n~/.cache/oxide-simulator/vm)")
	f.StringVar(&r.MachineType, "vm-machine", "pc", "`type` of the virtual machines: pc, as a rack's "+
		"hypervisor builds, or q35, with\na PCIe root port for each disk")
	f.Func("quota", "the silo's storage, a `size` such as 1073741824 or 10GiB (default 64TiB)",
		func(s string) error {
			quota, err := adminapi.ParseSize(s)
			r.QuotaBytes = int64(quota)
			return err
		})
	f.IntVar(&r.DiskLimit, "disk-limit", 0, "disks of an instance (default 12)")
	f.StringVar(&r.Role, "role", "", "the token's role in the projects: collaborator (default), "+
		"viewer, none, or fleet-admin: a collaborator who also has the pools of the fleet")
	f.DurationVar(&r.DeviceDelay, "device-delay", 0,
		"`time` from an attach until the device appears in the guest")
	f.DurationVar(&r.CreateHold, "create-hold", 0,
		"the least `time` that the creation of a disk takes")
	f.DurationVar(&r.SnapshotHold, "snapshot-hold", 0,
		"the least `time` that the creation of a snapshot takes")
	f.DurationVar(&r.FreeDelay, "free-delay", 0, "`time` from the deletion of a disk or snapshot "+
		"until its bytes and quota are freed;\na coming release frees them after the response")
	f.BoolVar(&r.QuotaFirst, "quota-first", false, "free the quota before the answer, and only the "+
		"space after --free-delay")
	f.DurationVar(&r.InstanceDelay, "instance-delay", 0,
		"`time` that an instance takes to start or stop")
	f.Func("seed", "YAML `file` with projects, images, instances and disks of the rack; or a number, "+
		"the seed for\nthe order and the numbers of devices", func(s string) (err error) {
		if r.Seed, err = strconv.ParseUint(s, 10, 64); err == nil {
			return nil
		}
		return readSeed(s, r)
	})
	f.BoolVar(&r.NoDiscards, "no-discards", false, "distributed disks refuse discards, so that their "+
		"bytes stay, as on a rack")
	f.IntVar(&r.FirstLoop, "first-loop", 0, "the lowest `number` of a loop device to use")
	f.BoolVar(&r.KeepDevices, "keep-devices", false, "leave the guests their disks at the end; "+
		"the next simulator on the directory adopts them")
	f.StringVar(&o.mutation, "mutation", "", "`name` of the rule that the rack breaks; "+
		"the admin listener's GET /mutations lists them")
	f.Func("flight-records", "`directory` of a driver's flight records, or a pattern of several, "+
		"which the console\nshows beside the requests; repeatable, and need not exist yet",
		func(s string) error {
			_, err := filepath.Match(s, "")
			return errors.Join(err, each(&o.flightRecords)(s))
		})
}

func (o *options) addImage(s string) error {
	name, content, ok := strings.Cut(s, "=")
	if !ok {
		return errors.New("expected NAME=SIZE or NAME=FILE")
	}
	image := simulator.ImageSpec{Name: name}
	if owner, rest, ok := strings.Cut(name, "/"); ok {
		image.Project, image.Name = owner, rest
	}
	size, err := adminapi.ParseSize(content)
	if err != nil {
		if _, missing := os.Stat(content); missing != nil {
			return fmt.Errorf("expected a size or a file: %w; %w", err, missing)
		}
		image.File = content
	}
	image.SizeBytes = int64(size)
	o.rack.Images = append(o.rack.Images, image)
	return nil
}

func (o *options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.rack.Dir == "" && o.rack.KeepDevices:
		return errors.New("--keep-devices needs --dir: without it the rack is gone at the end")
	case (o.tlsCert == "") != (o.tlsKey == ""):
		return errors.New("--tls-cert and --tls-key go together: give both or neither")
	case o.disks == diskFUSE && fuseProblem() != nil:
		return fmt.Errorf("--disks=fuse needs root and /dev/fuse, and not fusermount3: %w; without "+
			"--disks everything else works", fuseProblem())
	case !slices.Contains([]string{"", diskFiles, diskFUSE, diskNone}, o.disks):
		return fmt.Errorf("--disks is %q; use %s, %s or %s", o.disks, diskFiles, diskFUSE, diskNone)
	case o.guests != "" && o.guests != "dir" && o.guests != guestVM:
		return fmt.Errorf("--guests is %q; use dir or %s", o.guests, guestVM)
	case o.rack.MachineType != "pc" && o.rack.MachineType != "q35":
		return fmt.Errorf("--vm-machine is %q; use pc or q35", o.rack.MachineType)
	case o.guests == guestVM && o.disks != "" && o.disks != diskFiles:
		return errors.New("--guests=vm needs --disks=file: its disks are the machines' own")
	case o.disks != "" && o.disks != diskFiles && o.rack.KeepDevices:
		return errors.New("--keep-devices needs --disks=file: others end with the simulator")
	case o.logFormat != "text" && o.logFormat != "json":
		return errors.New("--log-format is neither text nor json")
	case o.rack.Token != "" && !strings.HasPrefix(o.rack.Token, "oxide-token-"):
		return errors.New("--token does not begin with oxide-token-, so no rack would accept it")
	}
	if o.tlsCert != "" {
		var err error
		if o.cert, err = tls.LoadX509KeyPair(o.tlsCert, o.tlsKey); err != nil {
			return fmt.Errorf("--tls-cert and --tls-key: %w", err)
		}
	}
	return nil
}

func fuseProblem() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("the user %d is not root", os.Geteuid())
	}
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err == nil {
		err = f.Close()
	}
	return err
}

// rehearse opens a rack with these options in a temporary directory without devices. So it reports
// a mistake in the options before the rack's directory is created.
func (o *options) rehearse(ctx context.Context) error {
	c := o.rack
	if entries, err := os.ReadDir(c.Dir); err == nil && len(entries) > 0 {
		return nil // the options do not change objects of an existing rack
	}
	c.Dir, c.Devices, c.FlakyDisks, c.Volatile = "", simulator.NoDevices, false, true
	c.Machines = ""
	c.Images = slices.Clone(c.Images)
	for n, i := range c.Images {
		if info, err := os.Stat(i.File); err == nil && info.Mode().IsRegular() {
			c.Images[n].File, c.Images[n].SizeBytes = "", max(i.SizeBytes, info.Size())
		}
	}
	probe, err := os.MkdirTemp("", "oxide-simulator-")
	if err != nil {
		return nil //nolint:nilerr // without a temporary directory there is no rehearsal
	}
	rack, err := simulator.Open(ctx, c)
	if err = errors.Join(err, os.Remove(probe)); err != nil {
		return err
	}
	return errors.Join(rack.Mutate(o.mutation), rack.Close())
}

func (o *options) choose() {
	o.rack.FlakyDisks = o.disks == diskFUSE
	if o.guests == guestVM {
		cache, _ := os.UserCacheDir() // without a cache directory, the user needs --vm-image
		o.rack.Machines = cmp.Or(o.image, filepath.Join(cache, "oxide-simulator", "vm"))
	}
	switch {
	case o.disks == diskNone:
		o.rack.Devices = simulator.NoDevices
	case o.disks == "" && !o.rack.KeepDevices:
		o.rack.Devices = simulator.DevicesIfPossible
	}
	if o.alone = o.rack.Dir == ""; o.alone && len(o.rack.Instances)+len(o.rack.Disks) == 0 {
		o.rack.Instances = []simulator.InstanceSpec{{Name: "a"}, {Name: "b"}}
	}
}

func (o *options) logHandler(w io.Writer) slog.Handler {
	options := &slog.HandlerOptions{Level: o.logLevel}
	if o.logFormat == "json" {
		return slog.NewJSONHandler(w, options)
	}
	return slog.NewTextHandler(w, options)
}

func (o *options) serverLog() *log.Logger {
	return slog.NewLogLogger(o.rack.Log.Handler(), slog.LevelDebug)
}

// secure wraps a listener in TLS if the options ask for HTTPS. Clients must then trust caFile.
func (o *options) secure(l net.Listener, dir string) (_ net.Listener, caFile string, err error) {
	var cert tls.Certificate
	switch {
	case o.tlsCert != "":
		cert = o.cert
		caFile, err = filepath.Abs(o.tlsCert)
	case o.tls:
		cert, caFile, err = simulator.Certificate(dir, o.tlsHosts)
	default:
		return l, "", nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("serve HTTPS: %w", err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	return tls.NewListener(l, config), caFile, nil
}

// shut ends the delays of requests in progress, and waits until the requests are answered.
func shut(server *http.Server, rack *simulator.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- rack.Close() }()
	err := server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	return errors.Join(err, <-closed)
}

// about is the JSON that the program prints when the rack is ready.
type about struct {
	URL     string `json:"url"`
	Admin   string `json:"admin"`
	Project string `json:"project"`
	CA      string `json:"ca,omitempty"`
	// SSHKey is the path of the private key with which root can log in to each virtual machine.
	SSHKey string `json:"ssh_key,omitempty"`
	// NoDevices is the reason why no instance sees a disk. It is "" if instances see their disks.
	NoDevices string     `json:"no_devices,omitempty"`
	Instances []instance `json:"instances"`
}

type instance struct {
	Name  string `json:"name"`
	ID    string `json:"id"`
	Guest string `json:"guest"`
	SSH   string `json:"ssh,omitempty"` // the address of the virtual machine's sshd
}

func reachable(listener net.Addr) string {
	tcp, ok := listener.(*net.TCPAddr)
	if !ok || !tcp.IP.IsUnspecified() {
		return listener.String()
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(tcp.Port))
}

func (o *options) describe(rack *simulator.Server, api, admin net.Addr) about {
	scheme := "http"
	if o.tls || o.tlsCert != "" {
		scheme = "https"
	}
	a := about{
		URL: scheme + "://" + reachable(api), Admin: "http://" + reachable(admin),
		Project: "default", Instances: []instance{}, SSHKey: rack.SSHKey(),
	}
	if len(o.rack.Projects) > 0 {
		a.Project = o.rack.Projects[0]
	}
	if why := rack.NoDevices(); why != nil {
		a.NoDevices = why.Error()
	}
	ssh := map[string]string{}
	for _, m := range rack.Machines() {
		ssh[m.InstanceID] = m.SSH
	}
	for _, i := range rack.Instances() {
		a.Instances = append(a.Instances, instance{i.Name, i.ID, rack.GuestDir(i.ID), ssh[i.ID]})
	}
	return a
}

// print prints the rack's addresses, as JSON or, without --dir, as commands for a shell.
func (o *options) print(a about, w io.Writer) error {
	if !o.alone {
		return json.NewEncoder(w).Encode(a)
	}
	_, err := io.WriteString(w, o.exports(a))
	return err
}

func (o *options) exports(a about) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# A simulated rack is ready. It is gone when it ends; --dir DIR keeps it.\n"+
		"export OXIDE_HOST=%s\nexport OXIDE_TOKEN=%s\nexport OXIDE_PROJECT=%s\n", a.URL,
		cmp.Or(o.rack.Token, "oxide-token-simulator"), a.Project)
	if a.CA != "" {
		fmt.Fprintf(&b, "export OXIDE_CA_FILE=%s\n", a.CA)
	}
	if a.NoDevices != "" {
		fmt.Fprintf(&b, "# No instance sees its disks as devices: %s\n",
			strings.ReplaceAll(a.NoDevices, "\n", "; "))
	}
	for _, i := range a.Instances {
		if host, port, err := net.SplitHostPort(i.SSH); err == nil {
			fmt.Fprintf(&b, "# Enter %s: ssh -i %s -p %s root@%s\n", i.Name, a.SSHKey, port, host)
		}
	}
	fmt.Fprintf(&b, "# Watch and disturb it: %s/\n# Stop it: Ctrl-C, or kill %d\n", a.Admin,
		os.Getpid())
	return b.String()
}
