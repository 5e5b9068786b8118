package driver

import (
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"regexp"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The settings of the rack.

func setHost(c *Config, value string) (err error) {
	c.Host, err = rack.ParseHost(value)
	return err
}

func (c *Config) rackWarnings() []string {
	var warnings []string
	if u, err := url.Parse(c.Host); err == nil && u.Scheme == "http" && !thisMachine(u.Hostname()) {
		warnings = append(warnings, "OXIDE_HOST is an http:// address of another machine: everybody on "+
			"the network path can read the token; set an https:// address")
	}
	if c.ClusterID == "" {
		warnings = append(warnings, "OXIDE_CLUSTER_ID is not set: if another cluster in this project "+
			"has none either, the two share their disks, and each deletes the other's; set a different id "+
			"for every cluster before its first volume, and keep it")
	}
	return warnings
}

// thisMachine reports whether a host is this machine by its name or address alone.
func thisMachine(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}

func setToken(c *Config, value string) error {
	c.Token = value
	return rack.CheckToken(c.Token)
}

func setProject(c *Config, value string) error {
	id, isID := rack.ID(value)
	switch {
	case isID:
		c.Project = string(id)
	case volume.RackName.MatchString(value):
		c.Project = value
	default:
		return errors.New("has to be the name or the UUID of a project")
	}
	return nil
}

var clusterID = volume.Word{Most: 63,
	Looks: regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$`)}

// runPrefix is the prefix of the cluster ID that oxide-conformance gives to its driver. A run finds
// and deletes its objects by that ID, and passes it in runVariable, too.
const (
	runPrefix   = "oxide-conformance-"
	runVariable = "OXIDE_CONFORMANCE_MARK"
)

func setClusterID(c *Config, value string) error {
	c.ClusterID = value
	if !clusterID.MatchString(value) {
		return errors.New("has to be at most 63 letters, digits, dots, hyphens and underscores, " +
			"with a letter or digit at both ends")
	}
	return nil
}

func setTopology(c *Config, value string) (err error) {
	c.Topology, err = volume.ParseTopology(value)
	return err
}

// setTopologyKey sets one key in every location, or adds the first location.
func setTopologyKey(name string) func(*Config, string) error {
	return func(c *Config, value string) error {
		if len(c.Topology) == 0 {
			c.Topology = []volume.Segments{{}}
		}
		for _, location := range c.Topology {
			if err := location.Add(name, value); err != nil {
				return err
			}
		}
		return nil
	}
}

func setTopologyInstance(c *Config, value string) error {
	if value != "true" && value != "false" {
		return errors.New("has to be true or false")
	}
	c.TopologyInstance = value == "true"
	return nil
}

// nodeTopology returns the topology of the node that runs on the instance.
func (c *Config) nodeTopology(instance string) map[string]string {
	segments := map[string]string{}
	for _, location := range c.Topology {
		maps.Copy(segments, location)
	}
	if c.TopologyInstance {
		segments[volume.InstanceKey] = instance
	}
	return segments
}

func (c *Config) declaresTopology() bool { return len(c.Topology) > 0 || c.TopologyInstance }

// address sets the address of a server. If local is set, only this machine can reach it.
func address(field func(*Config) *string, local bool) func(*Config, string) error {
	return func(c *Config, value string) error {
		*field(c) = value
		if strings.HasPrefix(value, "unix:") {
			_, err := socketPath(value)
			return err
		}
		host, port, err := net.SplitHostPort(value)
		switch bad := err != nil || port == ""; {
		case local && (bad || host != "localhost" && !net.ParseIP(host).IsLoopback()):
			return errors.New("has to be unix:///path/name.sock, localhost:port or 127.0.0.1:port: " +
				"profiles are not for other machines")
		case bad:
			return errors.New("has to be unix:///path/name.sock or host:port")
		}
		return nil
	}
}

// startFields returns the fields of the first line of the log. A node has no settings of a rack.
func (c *Config) startFields() []any {
	fields := []any{"version", Version(), "mode", string(c.Mode)}
	if u, err := url.Parse(c.Host); err == nil && c.Mode.controller() {
		fields = append(fields, "rack", u.Host, "project", c.Project, "cluster", c.ClusterID)
	}
	return fields
}

func (c *Config) rackOptions() rack.Options {
	return rack.Options{Host: c.Host, Project: c.Project, CAFile: c.CAFile,
		UserAgent: "oxide-csi-plugin/" + Version()}
}

func tokensOf(c Config, h *hidden, log *slog.Logger) *rack.TokenSource {
	h.add(c.Token)
	return &rack.TokenSource{Fixed: c.Token, Path: c.TokenFile, OnToken: h.add, Log: log}
}
