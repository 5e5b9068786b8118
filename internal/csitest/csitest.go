// Package csitest makes CSI requests and checks errors, for tests.
package csitest

import (
	"context"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Must ends the test on an error.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Want ends the test unless err has the code, reason and words, and passes Presentable.
func Want(t *testing.T, err error, code codes.Code, reason csierr.Reason, words ...string) {
	t.Helper()
	s := status.Convert(err)
	if s.Code() != code || !strings.HasPrefix(s.Message(), string(reason)+": ") ||
		slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(s.Message(), w) }) {
		t.Fatalf("got %v %q, want %v with reason %s and %q", s.Code(), s.Message(), code, reason, words)
	}
	Presentable(t, err, code)
}

// OK ends the test on an error. It is the check in test cases that expect success.
func OK(t *testing.T, err error) {
	t.Helper()
	Must(t, err)
}

// Fails returns a check that calls Want with this reason and the reason's code.
func Fails(reason csierr.Reason, words ...string) func(*testing.T, error) {
	own, _ := csierr.Explain(reason)
	return Coded(own.Code, reason, words...)
}

// Coded is like Fails, with another code than the reason's.
func Coded(code codes.Code, reason csierr.Reason, words ...string) func(*testing.T, error) {
	return func(t *testing.T, err error) {
		t.Helper()
		Want(t, err, code, reason, words...)
	}
}

// Got returns a function that returns the value, or ends the test if err is not nil.
func Got[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Must(t, err)
		return value
	}
}

// Says fails the test unless the error's text contains all words.
func Says(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil || slices.ContainsFunc(words, func(w string) bool {
		return !strings.Contains(err.Error(), w)
	}) {
		t.Errorf("got %v, want an error with %q", err, words)
	}
}

// Err returns the error of a call with two results.
func Err(_ any, err error) error { return err }

// Call is like Answer, and returns only the error.
func Call(ctx context.Context, service any, request proto.Message) error {
	return Err(Answer(ctx, service, request))
}

// Answer calls the method for this request on a server or a client.
func Answer(ctx context.Context, service any, request proto.Message) (proto.Message, error) {
	name := strings.TrimSuffix(string(request.ProtoReflect().Descriptor().Name()), "Request")
	results := reflect.ValueOf(service).MethodByName(name).Call([]reflect.Value{
		reflect.ValueOf(ctx), reflect.ValueOf(request)})
	err, _ := results[1].Interface().(error)
	return results[0].Interface().(proto.Message), err
}

// With edits the request, and returns it.
func With[R proto.Message](request R, edit func(R)) R {
	edit(request)
	return request
}

var startsWithReason = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*: \S`)

// Presentable ends the test unless the error has one of the codes and a message for callers: a
// reason, one line of limited length, no token, no details.
func Presentable(t *testing.T, err error, allowed ...codes.Code) {
	t.Helper()
	s := status.Convert(err)
	message := s.Message()
	switch {
	case !slices.Contains(allowed, s.Code()):
		t.Fatalf("the code is %v: %v", s.Code(), err)
	case !startsWithReason.MatchString(message), len(s.Details()) > 0,
		strings.ContainsAny(message, "\n\r\x00"), strings.Contains(message, "tweety"),
		!utf8.ValidString(message), len(message) > 1200, csierr.WithoutTokens(message) != message:
		t.Fatalf("the message is not presentable: %q", message)
	}
}

// UUID matches an id in canonical form.
var UUID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Filesystem returns a capability for a filesystem.
func Filesystem(fsType string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{
			Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		},
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fsType},
		},
	}
}

// InMode returns an ext4 capability with this access mode.
func InMode(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := Filesystem("ext4")
	c.AccessMode.Mode = mode
	return c
}

// Range returns a capacity range in bytes.
func Range(required, limit int64) *csi.CapacityRange {
	return &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
}

// Pairs parses lines of key=value.
func Pairs(text string) map[string]string {
	values := map[string]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if key, value, ok := strings.Cut(line, "="); ok {
			values[key] = value
		}
	}
	return values
}

// Topologies parses topologies in the form of the driver's flag, such as "region=R1,zone=Z2".
func Topologies(texts ...string) []*csi.Topology {
	var list []*csi.Topology
	for _, text := range texts {
		segments := map[string]string{}
		for key, value := range Pairs(strings.ReplaceAll(text, ",", "\n")) {
			segments["topology.csi.oxide.computer/"+key] = value
		}
		list = append(list, &csi.Topology{Segments: segments})
	}
	return list
}

// Await waits until met() is true. It ends the test after 10 seconds.
func Await(t *testing.T, what string, met func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if met() {
			return
		}
		<-time.After(2 * time.Millisecond)
	}
	t.Fatalf("timed out waiting until %s", what)
}

// SameMessage fails the test unless the messages are equal.
func SameMessage(t *testing.T, got, want proto.Message) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("the answer differs (-want +got):\n%s", diff)
	}
}
