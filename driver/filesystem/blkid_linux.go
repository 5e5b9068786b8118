package filesystem

import (
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// blkidAnswer is what blkid says of a disk.
type blkidAnswer struct {
	Type      string // a filesystem, or a member of something
	Table     string // a partition table
	Ambiguous bool   // more than one thing, and blkid will not choose
}

func (a blkidAnswer) any() bool { return a != blkidAnswer{} }

func (a blkidAnswer) String() string {
	var words []string
	if a.Table != "" {
		words = append(words, "a partition table ("+a.Table+")")
	}
	if a.Type != "" {
		words = append(words, a.Type)
	}
	if a.Ambiguous {
		words = append(words, "the marks of several filesystems or tables at once")
	}
	return strings.Join(words, " and ")
}

// The exit states of blkid -p (blkid(8)).
const (
	blkidFound     = 0
	blkidNothing   = 2
	blkidAmbiguous = 8
)

// blkid probes the open device: the program inherits the descriptor, so that it cannot be led to
// another device.
func blkid(f *os.File) (blkidAnswer, error) {
	result, err := runTool([]*os.File{f}, "blkid", "-p", "-o", "export", inherited)
	if err != nil {
		return blkidAnswer{}, err
	}
	switch result.Exit {
	case blkidFound:
		return parseBlkid(result.Stdout)
	case blkidNothing:
		return blkidAnswer{}, nil
	case blkidAmbiguous:
		return blkidAnswer{Ambiguous: true}, nil
	}
	return blkidAnswer{}, result.failure("blkid", f.Name())
}

// parseBlkid reads the output of blkid -o export. One that names neither a type nor a table is an
// error: something was found.
func parseBlkid(output string) (blkidAnswer, error) {
	var a blkidAnswer
	for line := range strings.Lines(output) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			a.Type = value
		case "PTTYPE":
			a.Table = value
		}
	}
	if !a.any() {
		return a, csierr.New(csierr.NodeToolFailed, "blkid found something but names neither a type "+
			"nor a partition table")
	}
	return a, nil
}
