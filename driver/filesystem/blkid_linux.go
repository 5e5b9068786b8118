package filesystem

import (
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The exit codes of blkid -p (blkid(8)).
const (
	blkidFound     = 0
	blkidNothing   = 2
	blkidAmbiguous = 8
)

// blkid probes the open device. The program inherits the descriptor, so it cannot probe another
// device. It returns the type of what was found, and more if it is not one filesystem alone.
func blkid(f *os.File) (string, error) {
	result, err := runTool([]*os.File{f}, "blkid", "-p", "-o", "export", inherited)
	if err != nil {
		return "", err
	}
	switch result.Exit {
	case blkidFound:
		return parseBlkid(result.Stdout)
	case blkidNothing:
		return "", nil
	case blkidAmbiguous:
		return "signatures of several filesystems or tables at once", nil
	}
	return "", result.failure("blkid", f.Name())
}

// parseBlkid parses the output of blkid -o export. Output without a type and a table is an error,
// because blkid did find something.
func parseBlkid(output string) (string, error) {
	var words []string
	for line := range strings.Lines(output) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), "="); key {
		case "TYPE":
			words = append(words, value)
		case "PTTYPE":
			words = append(words, "a partition table ("+value+")")
		}
	}
	found := strings.Join(words, " and ")
	if found == "" {
		return "", csierr.New(csierr.NodeToolFailed, "blkid found something but names neither a type "+
			"nor a partition table")
	}
	return found, nil
}
