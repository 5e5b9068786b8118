// Package driver serves Oxide disks as volumes of the Container Storage Interface.
//
// docs/life-of-a-volume.md shows what the calls do to a disk, docs/data-safety.md lists the rules
// for this, and ARCHITECTURE.md describes the packages and a call's path through them. No call
// needs what an earlier call kept in memory: the state is in the rack, sysfs and the kernel's mount
// tables. So any process can be killed at any point, and a repeated call continues from there.
//
// Each RPC only parses its request, does its work, and builds its response. Interceptors log each
// call without secrets, count it, recover panics, enforce CSI's field limits and admit one call at
// a time for each object.
package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/audit"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/claim"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/doctor"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// Main runs the plugin, or the subcommand that the first argument names, until ctx ends. The exit
// status is 0, or 1 for an error. If audit or doctor has findings, the status is 2 or 3.
func Main(ctx context.Context, args []string, getenv func(string) string,
	stdout, stderr io.Writer,
) int {
	status, err := runProgram(ctx, invocation{args, getenv, stdout, stderr})
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "oxide-csi-plugin:", err)
		return 1
	}
	return status
}

type invocation struct {
	args           []string
	getenv         func(string) string
	stdout, stderr io.Writer
}

var subcommands = map[string]func(context.Context, invocation) (status int, err error){
	auditCommand.name:   runAudit,
	claimCommand.name:   runClaim,
	doctorCommand.name:  runDoctor,
	inspectCommand.name: runInspect,
	readyCommand.name:   runReady,
	prestopCommand.name: runPrestop,
}

func runProgram(ctx context.Context, in invocation) (status int, err error) {
	if len(in.args) > 0 {
		if subcommand, ok := subcommands[in.args[0]]; ok {
			in.args = in.args[1:]
			return subcommand(ctx, in)
		}
	}
	config, err := ParseConfig(in.args, in.getenv, in.stdout)
	switch {
	case err != nil:
		return 0, err
	case config.PrintVersion:
		_, err := fmt.Fprintln(in.stdout, Version())
		return 0, err
	}
	return 0, Run(ctx, config, in.stderr)
}

// Release is a release's version, set by its build: -ldflags "-X <this package>.Release=v1.2.3".
var Release = ""

func clientVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		if module.Path == "github.com/oxidecomputer/oxide.go" {
			return module.Version
		}
	}
	return ""
}

// Version returns the release, or the version of the main module from the build information.
func Version() string {
	if Release != "" {
		return Release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}

// subcommand describes a command for operators, such as audit.
type subcommand struct {
	name, about string
	settings    []string // the environment variables of its settings
	operands    string   // describes the operands; if it is empty, parse refuses operands
}

var rackSettings = []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_PROJECT",
	"OXIDE_CLUSTER_ID", "OXIDE_CA_FILE"}

// parse sets c from flags and variables, and returns the operands, which may be mixed with the
// flags. With --help it writes the help text and returns flag.ErrHelp.
func (s subcommand) parse(in invocation, c *Config, own func(*flag.FlagSet)) (operands []string,
	err error) {
	flags := flag.NewFlagSet(s.name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	own(flags)
	values := addFlags(flags, s.has(c))
	for more := true; more; {
		switch err := flags.Parse(in.args); {
		case errors.Is(err, flag.ErrHelp):
			s.printHelp(in.stdout, flags)
			return nil, err
		case err != nil:
			return nil, fmt.Errorf("%s: %s; see %s --help", s.name, csierr.Plain(err.Error()), s.name)
		case flags.NArg() > 0 && s.operands == "":
			return nil, fmt.Errorf("%s: expected flags only, found %d other arguments; see %s --help",
				s.name, flags.NArg(), s.name)
		}
		if more = flags.NArg() > 0; more {
			operands, in.args = append(operands, flags.Arg(0)), flags.Args()[1:]
		}
	}
	return operands, c.apply(s.has(c), values, in.getenv)
}

func (s subcommand) has(c *Config) []setting {
	return slices.DeleteFunc(c.settings(), func(t setting) bool {
		return !slices.Contains(s.settings, t.env)
	})
}

func (s subcommand) printHelp(w io.Writer, flags *flag.FlagSet) {
	_, _ = fmt.Fprintln(w, s.about)
	flags.VisitAll(func(f *flag.Flag) {
		name, usage := flag.UnquoteUsage(f)
		left := strings.TrimSpace("--" + f.Name + " " + name)
		if f.DefValue != "" && f.DefValue != "false" {
			usage += " (default " + f.DefValue + ")"
		}
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", left, usage)
	})
	if slices.Contains(s.settings, "OXIDE_TOKEN") {
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", "$OXIDE_TOKEN", "the rack's token")
	}
}

var claimCommand = subcommand{
	name: "claim",
	about: "oxide-csi-plugin claim gives a claim another disk: a larger one, or one that holds what " +
		"a snapshot of the claim holds. The claim keeps its name and its workload, which is stopped " +
		"meanwhile. It asks Kubernetes only, with kubectl's rights.\n\n" +
		"  oxide-csi-plugin claim grow NAMESPACE/NAME --size SIZE\n" +
		"  oxide-csi-plugin claim revert NAMESPACE/NAME --snapshot NAME\n" +
		"  oxide-csi-plugin claim grow|revert NAMESPACE/NAME --continue|--undo\n" +
		"  oxide-csi-plugin claim forget NAMESPACE/NAME    give up the earlier disk, and end it\n\n" +
		"Exit status: 0 done, 1 error. It may be killed at any time and continued.",
	operands: "the change",
}

func runClaim(ctx context.Context, in invocation) (status int, err error) {
	var o claim.Options
	operands, err := claimCommand.parse(in, &Config{}, o.Flags)
	if err != nil {
		return 0, err
	}
	if err := o.Parse(operands); err != nil {
		return 0, fmt.Errorf("claim: %w; see claim --help", err)
	}
	o.Kubectl = kube.Pinned(ctx)
	if err := claim.Run(ctx, o, in.stdout); err != nil {
		return 0, fmt.Errorf("claim %s: %w", o.Verb, err)
	}
	return 0, nil
}

type auditConfig struct {
	Config
	audit.Options
}

var auditCommand = subcommand{
	name: "audit",
	about: "oxide-csi-plugin audit compares what the driver made on the rack for this cluster with " +
		"the wanted volumes.\nExit status: 0 nothing found, 2 orphans or missing volumes found, 1 error.",
	settings: rackSettings,
}

func parseAudit(in invocation) (c auditConfig, err error) {
	if _, err := auditCommand.parse(in, &c.Config, c.Flags); err != nil {
		return c, err
	}
	if why := c.noRack(); why != "" {
		return c, fmt.Errorf("%s: the audit needs the rack's address, a token and a project", why)
	}
	return c, c.Check(c.ClusterID)
}

func runAudit(ctx context.Context, in invocation) (status int, err error) {
	c, err := parseAudit(in)
	if err != nil {
		return 0, err
	}
	secrets := &hidden{}
	found, err := auditRack(ctx, c, tokensOf(c.Config, secrets, slog.New(slog.DiscardHandler)),
		hiddenWriter{in.stdout, secrets}, hiddenWriter{in.stderr, secrets})
	switch {
	case err != nil:
		return 0, errors.New(secrets.text(err.Error()))
	case found:
		return 2, nil
	}
	return 0, nil
}

func auditRack(ctx context.Context, c auditConfig, tokens *rack.TokenSource, out, log io.Writer) (
	found bool, err error) {
	for _, warning := range c.rackWarnings() {
		_, _ = fmt.Fprintln(log, "warning: "+warning)
	}
	client, closeIdle, err := rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens})
	if err != nil {
		return false, err
	}
	defer closeIdle()
	return audit.Run(ctx, client, c.ClusterID, c.Options, out, log)
}

var doctorCommand = subcommand{
	name: "doctor",
	about: "oxide-csi-plugin doctor explains why a volume does not work. It asks Kubernetes, the " +
		"rack and the node, and only reads.\n\n" +
		"  oxide-csi-plugin doctor pvc NAMESPACE/NAME\n" +
		"  oxide-csi-plugin doctor pod NAMESPACE/NAME\n" +
		"  oxide-csi-plugin doctor volume ID\n" +
		"  oxide-csi-plugin doctor node NAME\n" +
		"  oxide-csi-plugin doctor cluster\n" +
		"  oxide-csi-plugin doctor rack\n\n" +
		"Exit status: 0 nothing found, 2 something is broken, 3 nothing broken was found but something " +
		"could not be seen, 1 error.",
	settings: rackSettings,
	operands: "the question",
}

func runDoctor(ctx context.Context, in invocation) (status int, err error) {
	var c Config
	var o doctor.Options
	operands, err := doctorCommand.parse(in, &c, o.Flags)
	if err != nil {
		return 0, err
	}
	if o.Question, err = doctor.ParseQuestion(operands); err != nil {
		return 0, fmt.Errorf("doctor: %w; see doctor --help", err)
	}
	o.Colour = terminal(in.stdout)
	secrets := &hidden{}
	status, err = diagnose(ctx, c, o, hiddenWriter{in.stdout, secrets}, secrets)
	if err != nil {
		err = errors.New(secrets.text(err.Error()))
	}
	return status, err
}

func diagnose(ctx context.Context, c Config, o doctor.Options, out io.Writer, secrets *hidden) (
	status int, err error) {
	sources := doctor.Sources{NoRack: c.noRack(), ClusterID: c.ClusterID, Version: Version(),
		Kubectl: kube.Kubectl}
	// Redact the token even if no rack is asked: Kubernetes objects may contain it.
	tokens := tokensOf(c, secrets, slog.New(slog.DiscardHandler))
	if sources.NoRack == "" {
		client, closeIdle, err := rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens})
		if err != nil {
			return 0, err
		}
		defer closeIdle()
		sources.Rack = client
	}
	evidence, err := doctor.Gather(ctx, sources, o)
	if err != nil {
		return 0, fmt.Errorf("doctor: %w", err)
	}
	diagnosis := doctor.Diagnose(evidence)
	err = errors.Join(
		writeNew("--bundle", o.Bundle, secrets, func(w io.Writer) error {
			return doctor.WriteBundle(w, diagnosis, evidence)
		}),
		writeNew("--html", o.HTML, secrets, diagnosis.WriteHTML))
	if err != nil {
		return 0, err
	}
	return diagnosis.Status(), diagnosis.Write(out, o)
}

// writeNew writes a new file that only its owner can read. It refuses a path that exists, because
// an existing file keeps its mode and may be open in other processes.
func writeNew(flag, path string, secrets *hidden, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	var text bytes.Buffer
	if err := write(hiddenWriter{&text, secrets}); err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // O_EXCL follows no link
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s: has to name a new file, and the name exists; choose another one", flag)
	}
	if err == nil {
		_, err = f.Write(text.Bytes())
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", flag, csierr.WithoutPath(err))
	}
	return nil
}

// terminal reports whether out is a terminal whose user has not disabled colours (no-color.org).
func terminal(out io.Writer) bool {
	f, isFile := out.(*os.File)
	if !isFile || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&fs.ModeCharDevice != 0
}

var inspectCommand = subcommand{
	name: "inspect",
	about: "oxide-csi-plugin inspect prints, as JSON, what this node sees of its volumes: devices, " +
		"filesystems, mounts,\nrecords and the flight recorder. It runs in the driver's pod on the " +
		"node, beside the driver, and changes nothing.\nExit status: 0, or 1 for an error.",
	settings: []string{"OXIDE_SYSFS_ROOT", "OXIDE_DEV_ROOT", "OXIDE_STATE_DIR", node.InstanceIDKey,
		"OXIDE_INSTANCE_METADATA_FILE"},
}

func volumeFlag(volumes *[]inspection.Asked) func(*flag.FlagSet) {
	return func(flags *flag.FlagSet) {
		flags.Func("volume", "`ID[=DISK]` of a volume, and the name of its disk, which is needed while "+
			"the node has no record of it; may be repeated (default every volume that has a record)",
			func(value string) error {
				id, disk, _ := strings.Cut(value, "=")
				if id == "" || len(id) > volume.MaxStringBytes {
					return errors.New("has to be the id of a volume")
				}
				if canonical, ok := volume.ParseID(id); ok {
					id = canonical
				}
				*volumes = append(*volumes, inspection.Asked{ID: id, Disk: disk})
				return nil
			})
	}
}

func runInspect(_ context.Context, in invocation) (status int, err error) {
	var c Config
	var volumes []inspection.Asked
	if _, err := inspectCommand.parse(in, &c, volumeFlag(&volumes)); err != nil {
		return 0, err
	}
	id, unknown := node.InstanceID(node.Identity{Explicit: c.InstanceID,
		MetadataFile: c.InstanceMetadataFile, SysfsRoot: c.SysfsRoot})
	service := &node.Service{SysfsRoot: c.SysfsRoot, DevRoot: c.DevRoot, StateDir: c.StateDir,
		InstanceID: id, Log: slog.New(slog.DiscardHandler)}
	r := service.Inspect(volumes)
	r.Version = Version()
	if unknown != nil {
		r.Unseen = append(r.Unseen, inspection.Unseen{Part: inspection.PartInstance,
			Why: csierr.Plain(unknown.Error())})
	}
	encoder := json.NewEncoder(in.stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r); err != nil {
		return 0, fmt.Errorf("write the report: %w", err)
	}
	return 0, nil
}

var readyCommand = subcommand{
	name: "ready",
	about: "oxide-csi-plugin ready asks the plugin at CSI_ENDPOINT whether it can work. If it " +
		"cannot, it prints why:\nthe rack refuses it, the rack has not answered since it started, or " +
		"programs are missing.\nExit status: 0 ready, 1 not ready, or an error.",
	settings: []string{"CSI_ENDPOINT"},
}

// readyTimeout is shorter than the chart's probe timeout, so that the command can print the reason.
const readyTimeout = 4 * time.Second

func runReady(ctx context.Context, in invocation) (status int, err error) {
	var c Config
	if _, err := readyCommand.parse(in, &c, func(*flag.FlagSet) {}); err != nil {
		return 0, err
	}
	if c.Endpoint == "" {
		return 0, errNoEndpoint
	}
	return 0, ready(ctx, c.Endpoint)
}

func ready(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("CSI_ENDPOINT (--endpoint): %w", err)
	}
	defer func() { _ = conn.Close() }()
	var trailer metadata.MD
	answer, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.Trailer(&trailer))
	switch code := status.Code(err); {
	case code == codes.Unavailable:
		return errors.New("no plugin serves at CSI_ENDPOINT")
	case code == codes.DeadlineExceeded:
		return fmt.Errorf("the plugin at CSI_ENDPOINT has not answered for %s", readyTimeout)
	case err != nil:
		return errors.New(status.Convert(err).Message())
	case !answer.GetReady().GetValue():
		return errors.New("the plugin has started and waits for the first answer of the rack")
	case len(trailer.Get(waitingTrailer)) > 0:
		return errors.New(trailer.Get(waitingTrailer)[0])
	}
	return nil
}

var prestopCommand = subcommand{
	name: "prestop",
	about: "oxide-csi-plugin prestop keeps the node's driver while its node goes: as a preStop " +
		"hook, it waits until the\nprogram at OXIDE_LEAVE_SOCKET (oxide-node-keeper leave) closes the " +
		"connection, because the node's volumes are\ndetached or because the node stays. If nobody " +
		"serves there, it ends at once.\nExit status: 0, or 1 for an error or if --timeout has passed.",
	settings: []string{"OXIDE_LEAVE_SOCKET"},
}

func runPrestop(ctx context.Context, in invocation) (status int, err error) {
	var c Config
	timeout := 2 * time.Minute
	_, err = prestopCommand.parse(in, &c, func(flags *flag.FlagSet) {
		flags.DurationVar(&timeout, "timeout", timeout, "the longest `duration` to wait")
	})
	switch {
	case err != nil:
		return 0, err
	case c.LeaveSocket == "":
		return 0, errors.New("OXIDE_LEAVE_SOCKET (--leave-socket) is not set: it has to be an absolute " +
			"path")
	case timeout <= 0:
		return 0, errors.New("--timeout has to be positive")
	}
	return 0, awaitClose(ctx, c.LeaveSocket, timeout, in.stdout)
}

// awaitClose connects to the socket and waits until the program there closes the connection. If no
// program serves there, it returns immediately, and the driver ends as if it had no preStop hook.
func awaitClose(ctx context.Context, socket string, timeout time.Duration, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err == nil {
		defer func() { _ = conn.Close() }()
		log := slog.New(slog.NewTextHandler(out, nil))
		defer async.AfterDone(ctx, log, "closing the connection", func() { _ = conn.Close() })()
		_, err = io.Copy(io.Discard, conn)
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("the program at OXIDE_LEAVE_SOCKET has not closed the connection within %s; "+
			"see its log, and the VolumeAttachments of this node", timeout)
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		_, err = fmt.Fprintln(out, "no program serves at OXIDE_LEAVE_SOCKET, so the driver ends now:",
			err)
	}
	return err
}
