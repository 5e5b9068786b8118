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

// prefix begins the mark of every run. The mark is the cluster ID of the run's driver.
const prefix = "oxide-conformance-"

// mark is the description of every object that a run creates itself, without the driver. The disk
// that a run creates first and deletes last has every field of it; other objects have the run's
// ID alone.
type mark struct {
	// Run is the run's ID: 8 hexadecimal digits.
	Run string `json:"run"`
	// Host is the name of the machine that runs it. PID is the program's process ID there. Boot is
	// the ID of the machine's boot and of the namespace of process IDs.
	Host string `json:"host,omitempty"`
	PID  int    `json:"pid,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Start is the start time of the process, because its ID may become that of another one.
	Start string `json:"start,omitempty"`
	// Began is the time when the run began.
	Began *time.Time `json:"began,omitempty"`
	// Instances are the IDs of the instances to which the run attaches disks. The first one is the
	// instance in which it runs. Helper is the one that it starts and stops.
	Instances []string `json:"instances,omitempty"`
	Helper    string   `json:"helper,omitempty"`
}

// markWord begins every description that is a mark.
const markWord = "oxide-conformance "

func newRunID() string {
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

var isRunID = regexp.MustCompile(`^[0-9a-f]{8}$`).MatchString

// whole reports whether the mark is of the disk that describes its run.
func (m mark) whole() bool { return m.Host != "" && m.Began != nil }

func (m mark) description() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // cannot fail: strings, a number and a time
	}
	return markWord + string(text)
}

// parseMark parses a description that a run has written.
func parseMark(description string) (m mark, ok bool) {
	text, ok := strings.CutPrefix(description, markWord)
	if !ok || json.Unmarshal([]byte(text), &m) != nil || !isRunID(m.Run) {
		return mark{}, false
	}
	return m, true
}

// isMark reports whether a run has written a description.
func isMark(description string) bool {
	_, is := parseMark(description)
	return is
}

// driverWord begins the description of every object that the driver creates.
const driverWord = "csi.oxide.computer "

// runOf returns the run that created an object, from the description that the run or its driver
// wrote. It ignores names, because anybody may choose them.
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

// maxNameLength is the longest name that CSI allows, which csi-sanity uses.
const maxNameLength = 128

// withMark puts the mark before the names of all volumes and snapshots that are created. csi-sanity
// has fixed names, and its suites run one after another in one project.
func withMark(mark string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		// The request is copied, because csi-sanity sends some requests again.
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

// markedName returns the name with the mark before it. An empty name stays empty, because
// csi-sanity expects an error for it. A long name is cut to the limit and stays unique.
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
