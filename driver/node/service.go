// Package node implements CSI's node service.
//
// A call parses its request, finds the device by its serial, and keeps it open and locked until the
// call returns. Each call reads the mount table again. Package filesystem makes the volume's
// filesystem ready, and package mount mounts it.
//
// The service records for each volume which disk it is, in memory and in the state directory,
// because NodeUnstageVolume and NodeUnpublishVolume get only an id and a path. Records only make
// answers stricter, so the loss of one does no harm.
//
// The package never talks to the rack: a node needs no token. Its RPCs need Linux; elsewhere they
// answer UNIMPLEMENTED.
package node

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

const (
	defaultDeviceTimeout  = 30 * time.Second
	defaultReleaseTimeout = 5 * time.Second
)

// The kernel's own directories, which are the defaults of Service.
const (
	DefaultSysfsRoot = "/sys"
	DefaultDevRoot   = "/dev"
)

// Service is CSI's node service. Only InstanceID has to be set.
type Service struct {
	csi.UnimplementedNodeServer

	SysfsRoot     string // empty means /sys
	DevRoot       string // empty means /dev
	InstanceID    string
	MaxDisks      int // the disks that the rack allows per instance; 0 means 12
	Topology      map[string]string
	DeviceTimeout time.Duration // how long an attached disk may take to appear; 0 means 30 s
	// ReleaseTimeout is how long an unstage or unpublish waits for other users of the volume to end,
	// such as a short-lived mount namespace or a probe by udev. 0 means 5 s.
	ReleaseTimeout time.Duration
	// StateDir holds the records of volumes; empty means that they are kept in memory only.
	StateDir string
	Log      *slog.Logger

	once  sync.Once
	store *recordStore
	scans filesystem.ZeroScans
	// told contains the ids of volumes whose flush error an unpublish or unstage has returned, so that
	// a repeated call ignores the error. The next stage or publish removes the id.
	told sync.Map
}

// Close stops the reads of whole disks, which run in the background, and waits for their end.
func (n *Service) Close() {
	n.scans.Close()
}

func (n *Service) log() *slog.Logger { return cmp.Or(n.Log, slog.Default()) }

// Use counts the volumes and disks of a node.
type Use struct {
	Volumes int // staged or published
	Disks   int // the disks of the instance, including the boot disk
	Limit   int // the disks that the rack allows per instance
}

// InstanceIDKey is the environment variable, and the metadata file's key, for the instance's id.
const InstanceIDKey = "OXIDE_INSTANCE_ID"

// Identity contains the possible sources of the instance's id.
type Identity struct {
	Explicit     string // OXIDE_INSTANCE_ID
	MetadataFile string // OXIDE_INSTANCE_METADATA_FILE; empty means none
	SysfsRoot    string // empty means /sys
}

// InstanceID returns the UUID of the instance this process runs on, in lower case. All sources that
// have an id must agree, because with a wrong id disks are attached to somebody else's instance.
//
// It does not read the files of cloud-init. They contain the id, too, but an image of the disk
// copies them to other instances.
func InstanceID(n Identity) (string, error) {
	type claim struct{ source, id string }
	var claims []claim
	for _, source := range []struct {
		name string
		read func() (string, error)
	}{
		{InstanceIDKey, func() (string, error) { return n.Explicit, nil }},
		{"the metadata file", func() (string, error) { return metadataInstanceID(n.MetadataFile) }},
		{"SMBIOS", func() (string, error) { return smbiosInstanceID(n.SysfsRoot) }},
	} {
		text, err := source.read()
		if err != nil {
			return "", err
		}
		if text == "" {
			continue
		}
		id, err := canonicalUUID(text)
		if err != nil {
			return "", fmt.Errorf("%s holds an instance id that is not a UUID", source.name)
		}
		claims = append(claims, claim{source.name, id})
	}
	if len(claims) == 0 {
		return "", fmt.Errorf("the instance is unknown: this is no Oxide instance by its SMBIOS; "+
			"set %s to the instance's UUID, or OXIDE_INSTANCE_METADATA_FILE to a file that holds it",
			InstanceIDKey)
	}
	for _, c := range claims[1:] {
		if c.id != claims[0].id {
			return "", fmt.Errorf("%s and %s name different instances; correct or remove one of them",
				claims[0].source, c.source)
		}
	}
	return claims[0].id, nil
}

// canonicalUUID accepts a UUID only with hyphens, as the rack writes it, in upper or lower case.
func canonicalUUID(s string) (string, error) {
	const length = 36 // with hyphens; uuid.Parse also accepts other forms
	id, err := uuid.Parse(s)
	if err != nil || len(s) != length || id == uuid.Nil {
		return "", errors.New("not a UUID")
	}
	return id.String(), nil
}

func metadataInstanceID(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("OXIDE_INSTANCE_METADATA_FILE: %w", csierr.WithoutPath(err))
	}
	id, err := parseMetadata(b)
	if err != nil {
		return "", fmt.Errorf("OXIDE_INSTANCE_METADATA_FILE: %w", err)
	}
	return id, nil
}

// parseMetadata finds the instance's id among KEY=VALUE lines. It ignores comments and other keys;
// the value may be quoted. A file without the key is an error.
func parseMetadata(b []byte) (string, error) {
	var id string
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		key, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), "=")
		if strings.TrimSpace(key) != InstanceIDKey {
			continue
		}
		value = strings.TrimSpace(value)
		for _, quote := range []string{`"`, `'`} {
			if len(value) >= 2 && strings.HasPrefix(value, quote) && strings.HasSuffix(value, quote) {
				value = value[1 : len(value)-1]
			}
		}
		if id != "" && id != value {
			return "", fmt.Errorf("it has %s twice with different values", InstanceIDKey)
		}
		id = value
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	if id == "" {
		return "", fmt.Errorf("it has no line %s=…", InstanceIDKey)
	}
	return id, nil
}

// smbiosInstanceID reads the instance's id from SMBIOS. It returns "" if the vendor is not Oxide,
// because other vendors put the machine's serial number there.
func smbiosInstanceID(sysfsRoot string) (string, error) {
	if sysfsRoot == "" {
		sysfsRoot = DefaultSysfsRoot
	}
	dir := filepath.Join(sysfsRoot, "class", "dmi", "id")
	vendor, err := os.ReadFile(filepath.Join(dir, "sys_vendor"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the vendor from SMBIOS: %w", err)
	}
	if parseDMI(vendor) != "Oxide" {
		return "", nil
	}
	serial, err := os.ReadFile(filepath.Join(dir, "product_serial"))
	if err != nil {
		return "", fmt.Errorf("read the instance id from SMBIOS: %w", err)
	}
	return parseDMI(serial), nil
}

func parseDMI(b []byte) string { return string(bytes.Trim(b, "\x00 \n\t")) }
