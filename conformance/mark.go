package conformance

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// prefix begins the mark of every run, which is the cluster ID of its driver.
const prefix = "oxide-conformance-"

// mark is what the description of everything says that a run makes itself, past the driver. The
// disk that a run makes first and deletes last has all of it, other objects the run alone.
type mark struct {
	// Run is the run's ID: 8 hexadecimal digits.
	Run string `json:"run"`
	// Host is the name of the machine that runs it, PID the program's process ID there, and Boot the
	// ID of the machine's boot and of the namespace of process IDs.
	Host string `json:"host,omitempty"`
	PID  int    `json:"pid,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Began is when the run began.
	Began *time.Time `json:"began,omitempty"`
	// Instances are the IDs of those that the run attaches disks to, first the one in which it runs.
	// Helper is the one of them that it starts and stops.
	Instances []string `json:"instances,omitempty"`
	Helper    string   `json:"helper,omitempty"`
}

// markWord begins a description that is a mark.
const markWord = "oxide-conformance "

// newRunID makes the ID of a run.
func newRunID() string {
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

// isRunID recognizes the IDs of runs.
var isRunID = regexp.MustCompile(`^[0-9a-f]{8}$`).MatchString

// whole reports whether it is the mark of the disk that describes its run.
func (m mark) whole() bool { return m.Host != "" && m.Began != nil }

func (m mark) description() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // cannot fail: strings, a number and a time
	}
	return markWord + string(text)
}

// parseMark reads a description that a run has written.
func parseMark(description string) (m mark, ok bool) {
	text, ok := strings.CutPrefix(description, markWord)
	if !ok || json.Unmarshal([]byte(text), &m) != nil || !isRunID(m.Run) {
		return mark{}, false
	}
	return m, true
}

// driverWord begins the description of what the driver makes.
const driverWord = "csi.oxide.computer "

// runOf returns the run that has made an object, by the description that the run or its driver has
// given it. Names do not count: anybody may give them.
func runOf(description string) (run string, ok bool) {
	if m, ok := parseMark(description); ok {
		return m.Run, true
	}
	text, ok := strings.CutPrefix(description, driverWord)
	if !ok {
		return "", false
	}
	var tag struct {
		Cluster string `json:"cluster"`
	}
	if json.Unmarshal([]byte(text), &tag) != nil {
		return "", false
	}
	run, ok = strings.CutPrefix(tag.Cluster, prefix)
	return run, ok && isRunID(run)
}

// maxNameLength is what csi-sanity uses to the full, and CSI grants.
const maxNameLength = 128

// withMark puts the mark before the name of every volume and snapshot that is created: csi-sanity
// has fixed names, and its suites follow each other in one project.
func withMark(mark string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		// A copy, because csi-sanity sends some requests again.
		switch asked := req.(type) {
		case *csi.CreateVolumeRequest:
			marked := proto.Clone(asked).(*csi.CreateVolumeRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		case *csi.CreateSnapshotRequest:
			marked := proto.Clone(asked).(*csi.CreateSnapshotRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

// markedName keeps an empty name empty, which is a mistake that csi-sanity makes on purpose, and a
// long one within the limit and distinct.
func markedName(mark, name string) string {
	if name == "" {
		return ""
	}
	marked := mark + "-" + name
	if len(marked) <= maxNameLength {
		return marked
	}
	sum := sha256.Sum256([]byte(name))
	tail := "-" + hex.EncodeToString(sum[:4])
	return marked[:maxNameLength-len(tail)] + tail
}
