package driver

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/node"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// InspectConfig is the configuration of an inspection, which ParseInspectConfig fills. It uses only
// the fields of Config that describe the node.
type InspectConfig struct {
	Config
	Volumes []inspection.Asked
}

var inspectCommand = subcommand{
	name: "inspect",
	about: "oxide-csi-plugin inspect prints, as JSON, what this node sees of its volumes: devices, " +
		"filesystems, mounts,\nrecords and the flight recorder. It runs in the driver's pod on the " +
		"node, beside the driver, and changes nothing.\nExit status: 0, or 1 for an error.",
	settings: []string{"OXIDE_SYSFS_ROOT", "OXIDE_DEV_ROOT", "OXIDE_STATE_DIR", node.InstanceIDKey,
		"OXIDE_INSTANCE_METADATA_FILE"},
}

// ParseInspectConfig parses the arguments after "inspect" and the environment.
func ParseInspectConfig(args []string, getenv func(string) string, help io.Writer) (InspectConfig,
	error) {
	var c InspectConfig
	_, err := inspectCommand.parse(&c.Config, c.flags, args, getenv, help)
	return c, err
}

func (c *InspectConfig) flags(flags *flag.FlagSet) {
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
			c.Volumes = append(c.Volumes, inspection.Asked{ID: id, Disk: disk})
			return nil
		})
}

// Inspect writes what this node sees of the volumes to out.
func Inspect(c InspectConfig, out io.Writer) error {
	id, unknown := node.InstanceID(node.Identity{Explicit: c.InstanceID,
		MetadataFile: c.InstanceMetadataFile, SysfsRoot: c.SysfsRoot})
	service := &node.Service{SysfsRoot: c.SysfsRoot, DevRoot: c.DevRoot, StateDir: c.StateDir,
		InstanceID: id, Log: slog.New(slog.DiscardHandler)}
	r := service.Inspect(c.Volumes)
	r.Version = Version()
	if unknown != nil {
		r.Unseen = append(r.Unseen, inspection.Unseen{Part: inspection.PartInstance,
			Why: csierr.Plain(unknown.Error())})
	}
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
