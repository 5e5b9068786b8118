package node

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// InstanceIDKey is the variable, and the key in the metadata file, that holds the instance's id.
const InstanceIDKey = "OXIDE_INSTANCE_ID"

// Identity names the sources of the instance's id.
type Identity struct {
	Explicit     string // OXIDE_INSTANCE_ID
	MetadataFile string // OXIDE_INSTANCE_METADATA_FILE; empty means none
	SysfsRoot    string // empty means /sys
}

// InstanceID returns the UUID of the instance this process runs on, in lower case. All sources that
// hold an id must agree, because a wrong identity attaches disks to somebody else's instance.
//
// cloud-init knows the id, too, but what it leaves on the disk outlives the instance in an image.
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

// canonicalUUID accepts the one form that the rack writes, in either case.
func canonicalUUID(s string) (string, error) {
	const length = 36 // with hyphens; uuid.Parse takes others too
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

// smbiosInstanceID reads the id that the hypervisor gives to the guest, on a machine made by Oxide
// only: elsewhere product_serial is the number on a sticker.
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

// parseDMI parses a string as /sys/class/dmi/id writes it.
func parseDMI(b []byte) string { return string(bytes.Trim(b, "\x00 \n\t")) }
