package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/doctor"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// DoctorConfig is the configuration of a doctor, which ParseDoctorConfig fills. It uses only the
// fields of Config that describe the rack.
type DoctorConfig struct {
	Config
	doctor.Options
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

// ParseDoctorConfig parses the arguments after "doctor" and the environment, as ParseConfig does
// for the plugin.
func ParseDoctorConfig(args []string, getenv func(string) string, help io.Writer) (DoctorConfig,
	error) {
	var c DoctorConfig
	operands, err := doctorCommand.parse(&c.Config, c.Flags, args, getenv, help)
	if err != nil {
		return c, err
	}
	if c.Question, err = doctor.ParseQuestion(operands); err != nil {
		return c, fmt.Errorf("doctor: %w; see doctor --help", err)
	}
	return c, nil
}

// Doctor explains the state of what the question is about, writes its report to out, and returns
// the exit status.
func Doctor(ctx context.Context, c DoctorConfig, out io.Writer) (status int, err error) {
	secrets := &hidden{}
	c.Colour = terminal(out)
	status, err = diagnose(ctx, c, tokensOf(c.Config, secrets, slog.New(slog.DiscardHandler)),
		hiddenWriter{out, secrets}, secrets)
	if err != nil {
		err = errors.New(secrets.text(err.Error()))
	}
	return status, err
}

func diagnose(ctx context.Context, c DoctorConfig, tokens *rack.TokenSource, out io.Writer,
	secrets *hidden) (status int, err error) {
	sources := doctor.Sources{NoRack: c.noRack(), ClusterID: c.ClusterID, Version: Version(),
		Kubectl: kube.Kubectl}
	if sources.NoRack == "" {
		client, closeIdle, err := rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens})
		if err != nil {
			return 0, err
		}
		defer closeIdle()
		sources.Rack = client
	}
	evidence, err := doctor.Gather(ctx, sources, c.Options)
	if err != nil {
		return 0, fmt.Errorf("doctor: %w", err)
	}
	diagnosis := doctor.Diagnose(evidence)
	err = errors.Join(
		writeNew("--bundle", c.Bundle, secrets, func(w io.Writer) error {
			return doctor.WriteBundle(w, diagnosis, evidence)
		}),
		writeNew("--html", c.HTML, secrets, diagnosis.WriteHTML))
	if err != nil {
		return 0, err
	}
	return diagnosis.Status(), diagnosis.Write(out, c.Options)
}

// writeNew writes to a new file that only its owner reads. A file that exists, or a link, keeps its
// mode and its readers, so it is refused. Without a path it does nothing.
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

// terminal reports whether text with colours may be written: to a terminal whose user wants them
// (no-color.org).
func terminal(out io.Writer) bool {
	f, isFile := out.(*os.File)
	if !isFile || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&fs.ModeCharDevice != 0
}
