package filesystem

import (
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// blkidResult is what blkid found on a disk.
type blkidResult struct {
	Type      string // of a filesystem, or of a member of a RAID, a volume group or the like
	Table     string // of a partition table
	Ambiguous bool   // several were found, and blkid did not choose
}

func (r blkidResult) found() bool { return r != blkidResult{} }

func (r blkidResult) String() string {
	var words []string
	if r.Table != "" {
		words = append(words, "a partition table ("+r.Table+")")
	}
	if r.Type != "" {
		words = append(words, r.Type)
	}
	if r.Ambiguous {
		words = append(words, "signatures of several filesystems or tables at once")
	}
	return strings.Join(words, " and ")
}

// The exit codes of blkid -p (blkid(8)).
const (
	blkidFound     = 0
	blkidNothing   = 2
	blkidAmbiguous = 8
)

// blkid probes the open device. The program inherits the descriptor, so it cannot probe another
// device.
func blkid(f *os.File) (blkidResult, error) {
	result, err := runTool([]*os.File{f}, "blkid", "-p", "-o", "export", inherited)
	if err != nil {
		return blkidResult{}, err
	}
	switch result.Exit {
	case blkidFound:
		return parseBlkid(result.Stdout)
	case blkidNothing:
		return blkidResult{}, nil
	case blkidAmbiguous:
		return blkidResult{Ambiguous: true}, nil
	}
	return blkidResult{}, result.failure("blkid", f.Name())
}

// parseBlkid parses the output of blkid -o export. Output without a type and a table is an error,
// because blkid did find something.
func parseBlkid(output string) (blkidResult, error) {
	var r blkidResult
	for line := range strings.Lines(output) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			r.Type = value
		case "PTTYPE":
			r.Table = value
		}
	}
	if !r.found() {
		return r, csierr.New(csierr.NodeToolFailed, "blkid found something but names neither a type "+
			"nor a partition table")
	}
	return r, nil
}
