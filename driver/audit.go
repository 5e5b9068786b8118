package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/audit"
)

// AuditConfig is the configuration of an audit, which ParseAuditConfig fills. It uses only the
// fields of Config that describe the rack.
type AuditConfig struct {
	Config
	audit.Options
}

var auditCommand = subcommand{
	name: "audit",
	about: "oxide-csi-plugin audit compares what the driver made on the rack for this cluster with " +
		"the wanted volumes.\nExit status: 0 nothing found, 2 orphans or missing volumes found, 1 error.",
	settings: rackSettings,
}

// ParseAuditConfig parses the arguments after "audit" and the environment, as ParseConfig does for
// the plugin.
func ParseAuditConfig(args []string, getenv func(string) string, help io.Writer) (AuditConfig,
	error) {
	var c AuditConfig
	if _, err := auditCommand.parse(&c.Config, c.Flags, args, getenv, help); err != nil {
		return c, err
	}
	if why := c.noRack(); why != "" {
		return c, fmt.Errorf("%s: the audit needs the rack's address, a token and a project", why)
	}
	return c, c.Check(c.ClusterID)
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
