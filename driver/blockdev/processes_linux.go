package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Processes lists the processes that can be seen.
func Processes() ([]int, error) {
	names, err := ReadNames("/proc")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

func ReadNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return f.Readdirnames(-1)
}

// ProcessName is how a process is called.
func ProcessName(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	if err != nil {
		return "gone"
	}
	return csierr.Plain(strings.TrimSpace(string(b)))
}
