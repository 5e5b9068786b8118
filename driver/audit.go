package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/audit"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
)

// AuditConfig is the configuration of an audit, which ParseAuditConfig fills. It uses only the
// fields of Config that describe the rack.
type AuditConfig struct {
	Config
	audit.Options
}

// rackSettings are the plugin's settings that an audit has too.
var rackSettings = []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_PROJECT",
	"OXIDE_CLUSTER_ID", "OXIDE_CA_FILE"}

// ParseAuditConfig parses the arguments after "audit" and the environment, as ParseConfig does for
// the plugin.
func ParseAuditConfig(args []string, getenv func(string) string, help io.Writer) (AuditConfig,
	error) {
	var c AuditConfig
	values := map[string]string{}
	flags := auditFlags(&c, values)
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		printAuditHelp(help, flags)
		return c, err
	case err != nil:
		return c, fmt.Errorf("audit: %s; see audit --help", csierr.Plain(err.Error()))
	case flags.NArg() > 0:
		return c, fmt.Errorf("audit: expected flags only, found %d other arguments; see audit --help",
			flags.NArg())
	}
	for _, s := range settings {
		if !slices.Contains(rackSettings, s.env) {
			continue
		}
		value := s.value(values, getenv)
		if value == "" {
			continue
		}
		if err := s.set(&c.Config, value); err != nil {
			return c, fmt.Errorf("%s: %w", s.name(), err)
		}
	}
	return c, c.complete()
}

func auditFlags(c *AuditConfig, values map[string]string) *flag.FlagSet {
	flags := flag.NewFlagSet("audit", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	c.Flags(flags)
	for _, s := range settings {
		if s.flag != "" && slices.Contains(rackSettings, s.env) {
			flags.Func(s.flag, s.usage+" [$"+s.env+"]", func(value string) error {
				values[s.flag] = value
				return nil
			})
		}
	}
	return flags
}

// complete reports missing and contradictory settings.
func (c *AuditConfig) complete() error {
	switch {
	case c.Host == "":
		return errors.New("OXIDE_HOST (--host) is not set: the audit needs the rack's address")
	case c.Token == "" && c.TokenFile == "":
		return errors.New("OXIDE_TOKEN is not set, and neither is OXIDE_TOKEN_FILE: the audit needs " +
			"a token of the rack")
	case c.Project == "":
		return errors.New("OXIDE_PROJECT (--project) is not set: the audit needs a project")
	}
	return c.Check(c.ClusterID)
}

// Audit compares what the driver made on the rack for this cluster with the wanted volumes and
// snapshots, and writes a report to out. found reports whether orphans or missing volumes are left.
func Audit(ctx context.Context, c AuditConfig, out, log io.Writer) (found bool, err error) {
	secrets, quiet := &hidden{}, slog.New(slog.DiscardHandler)
	out, log = hiddenWriter{out, secrets}, hiddenWriter{log, secrets}
	found, err = auditRack(ctx, c, tokensOf(c.Config, secrets, quiet), out, log)
	if err != nil {
		err = errors.New(secrets.text(err.Error()))
	}
	return found, err
}

func auditRack(ctx context.Context, c AuditConfig, tokens *rack.TokenSource, out, log io.Writer) (
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

func printAuditHelp(w io.Writer, flags *flag.FlagSet) {
	_, _ = fmt.Fprintln(w, "oxide-csi-plugin audit compares what the driver made on the rack for "+
		"this cluster with the wanted volumes.\nExit status: 0 nothing found, 2 orphans or missing "+
		"volumes found, 1 error.")
	flags.VisitAll(func(f *flag.Flag) {
		name, usage := flag.UnquoteUsage(f)
		left := strings.TrimSpace("--" + f.Name + " " + name)
		if f.DefValue != "" && f.DefValue != "false" {
			usage += " (default " + f.DefValue + ")"
		}
		_, _ = fmt.Fprintf(w, "  %-24s %s\n", left, usage)
	})
	_, _ = fmt.Fprintf(w, "  %-24s %s\n", "$OXIDE_TOKEN", "the rack's token")
}
