package program

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// seed is the content of the file of --seed, which docs/howto/simulator.md describes.
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

// size is a number of bytes, as ParseSize reads it.
type size int64

// UnmarshalYAML reads 1073741824, 1GiB or 1 GiB.
func (s *size) UnmarshalYAML(n *yaml.Node) error {
	parsed, err := adminapi.ParseSize(n.Value)
	if err != nil {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %s", n.Line, err)}}
	}
	*s = size(parsed)
	return nil
}

// readSeed adds the objects of a file to the config. Paths in the file are relative to it.
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

// oneLine returns the errors about a file in one line, without the names of Go types.
func oneLine(err error) error {
	var mistakes *yaml.TypeError
	if !errors.As(err, &mistakes) {
		return err
	}
	text := strings.Join(mistakes.Errors, "; ")
	return errors.New(unknownKey.ReplaceAllString(text, `unknown key "$1"`))
}
