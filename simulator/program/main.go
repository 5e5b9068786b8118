// Package program is oxide-simulator without its main function: it parses the command line and
// serves a rack. The conformance program also uses it, to demonstrate a run on a simulated rack.
package program

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Release is the version. A release's build sets it: -ldflags "-X <this package>.Release=v1.2.3".
var Release = ""

// Main runs oxide-simulator until ctx ends, and returns the exit status.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if err := run(ctx, args, stdout, stderr); err != nil {
		fmt.Fprintln(stderr, "oxide-simulator:", strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 1 && strings.TrimLeft(args[0], "-") == "version" {
		_, err := fmt.Fprintln(stdout, cmp.Or(Release, "devel"))
		return err
	}
	o, err := parse(args, stdout, stderr)
	if err != nil || o == nil {
		return err
	}
	api, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen for the API: %w", err)
	}
	defer api.Close()
	admin, err := net.Listen("tcp", o.admin)
	if err != nil {
		return fmt.Errorf("listen for the admin listener: %w", err)
	}
	defer admin.Close()
	if err := o.rehearse(ctx); err != nil {
		return err
	}
	rack, err := simulator.Open(ctx, o.rack)
	if err != nil {
		return err
	}
	rack.Flights.Dirs = o.flightRecords
	if err = rack.Mutate(o.mutation); err == nil {
		err = serve(ctx, o, rack, api, admin, stdout)
	}
	if closeErr := rack.Close(); err == nil {
		err = closeErr
	}
	return err
}

func serve(ctx context.Context, o *options, rack *simulator.Server, api, admin net.Listener,
	stdout io.Writer) error {
	about := o.describe(rack, api.Addr(), admin.Addr())
	api, ca, err := o.secure(api, rack.Dir())
	if err != nil {
		return err
	}
	about.CA = ca
	group, ctx := errgroup.WithContext(ctx)
	start := func(l net.Listener, h http.Handler) {
		server := &http.Server{Handler: h, ReadHeaderTimeout: 30 * time.Second,
			IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10, ErrorLog: o.serverLog()}
		group.Go(func() error {
			if err := server.Serve(l); err != http.ErrServerClosed {
				return err
			}
			return nil
		})
		group.Go(func() error {
			<-ctx.Done()
			return shut(server, rack)
		})
	}
	start(api, rack)
	start(admin, rack.Admin())
	if about.NoDevices != "" && !o.alone {
		o.rack.Log.Warn("the disks are files only, and no instance sees them as devices",
			slog.String("reason", about.NoDevices))
	}
	if err := o.print(about, stdout); err != nil {
		return fmt.Errorf("print where the rack is: %w", err)
	}
	return group.Wait()
}

// seed is the content of the file that --seed names. docs/howto/simulator.md describes it.
type seed struct {
	Projects []string `yaml:"projects"`
	Images   []struct {
		simulator.ImageSpec `yaml:",inline"`
		Size                size `yaml:"size"`
	} `yaml:"images"`
	Instances []simulator.InstanceSpec `yaml:"instances"`
	Disks     []struct {
		simulator.DiskSpec `yaml:",inline"`
		Size               size `yaml:"size"`
	} `yaml:"disks"`
}

type size int64

// UnmarshalYAML parses a size such as 1073741824, 1GiB or 1 GiB.
func (s *size) UnmarshalYAML(n *yaml.Node) error {
	parsed, err := adminapi.ParseSize(n.Value)
	if err != nil {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %s", n.Line, err)}}
	}
	*s = size(parsed)
	return nil
}

// readSeed adds the objects in a seed file to the config. Paths are relative to the file's folder.
func readSeed(path string, c *simulator.Config) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var from seed
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err = d.Decode(&from); errors.Is(err, io.EOF) {
		err = errors.New("it is empty")
	}
	if err == nil && !errors.Is(d.Decode(new(yaml.Node)), io.EOF) {
		err = errors.New("it has more than one document")
	}
	if err != nil {
		return fmt.Errorf("%w (docs/howto/simulator.md has the form)", oneLine(err))
	}
	c.Projects = append(c.Projects, from.Projects...)
	for _, i := range from.Images {
		if i.File != "" && !filepath.IsAbs(i.File) {
			i.File = filepath.Join(filepath.Dir(path), i.File)
		}
		i.SizeBytes = int64(i.Size)
		c.Images = append(c.Images, i.ImageSpec)
	}
	c.Instances = append(c.Instances, from.Instances...)
	for _, d := range from.Disks {
		d.SizeBytes = int64(d.Size)
		c.Disks = append(c.Disks, d.DiskSpec)
	}
	return nil
}

var unknownKey = regexp.MustCompile(`field (\S+) not found in type .*`)

// oneLine joins the messages of a YAML error into one line, and removes the names of Go types.
func oneLine(err error) error {
	var mistakes *yaml.TypeError
	if !errors.As(err, &mistakes) {
		return err
	}
	text := strings.Join(mistakes.Errors, "; ")
	return errors.New(unknownKey.ReplaceAllString(text, `unknown key "$1"`))
}
