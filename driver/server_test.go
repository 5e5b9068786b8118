package driver

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

const canary = "tweetytweety"

type logBook struct {
	mu sync.Mutex
	// guarded by mu
	text bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

type served struct {
	conn *grpc.ClientConn
	log  *logBook
	stop func() error
	path string
}

func serve(t *testing.T, s *csiServer) *served {
	t.Helper()
	out := &served{log: &logBook{}, path: filepath.Join(shortDir(t), "csi.sock")}
	s.Log = newLog(Config{LogLevel: slog.LevelDebug - 4}, &hidden{}, out.log)
	s.Identity, s.metrics, s.hidden = &identityService{}, newMetrics(), &hidden{}
	listener := csitest.Got(listenUnix(out.path))(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := inBackground(func() error { return s.serve(ctx, listener) })
	stop := sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	out.stop = stop
	t.Cleanup(func() { _ = stop() })
	out.conn = csitest.Got(grpc.NewClient("unix://"+out.path,
		grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { _ = out.conn.Close() })
	return out
}

type oddController struct {
	csi.UnimplementedControllerServer
	create func() error
}

func (o oddController) CreateVolume(context.Context, *csi.CreateVolumeRequest) (
	*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{}, o.create()
}

func serveCreate(t *testing.T, work func() error) (*served, func(ctx context.Context,
	name string) error) {
	t.Helper()
	s := serve(t, &csiServer{Controller: oddController{create: work}})
	return s, func(ctx context.Context, name string) error {
		return csitest.Call(ctx, csi.NewControllerClient(s.conn), &csi.CreateVolumeRequest{Name: name})
	}
}

func inBackground(call func() error) <-chan error {
	result := make(chan error, 1)
	go func() { result <- call() }()
	return result
}

func TestACallThatPanicsReturnsInternalAndTheServerContinues(t *testing.T) {
	for name, work := range map[string]func() error{
		"in the call": panicking,
		"in the background": func() error {
			return csitest.Err(async.Start(func() (any, error) { return nil, panicking() })())
		},
		"in a group": func() error {
			var group async.Group
			for range 3 {
				group.Go(func() { _ = panicking() })
			}
			group.Wait()
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, create := serveCreate(t, work)
			for range 2 { // the second call fails if the panic left the lock held
				fails(csierr.Internal)(t, create(t.Context(), "x"))
			}
			if log := s.log.String(); !strings.Contains(log, "driver.panicking") ||
				!strings.Contains(log, "in=CreateVolume") || strings.Contains(log, canary) {
				t.Errorf("the log has to hold the goroutine's stack and not the panic's text:\n%s", log)
			}
		})
	}
}

func panicking() error { panic("the secret is " + canary) }

func TestTheLockOfAnObjectIsHeldUntilTheHandlerReturns(t *testing.T) { // B-12, B-11
	working, finish := make(chan struct{}, 1), make(chan struct{})
	_, create := serveCreate(t, func() error {
		working <- struct{}{}
		<-finish // ignores the context, like mkfs
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := inBackground(func() error { return create(ctx, "a") })
	<-working
	cancel()
	if err := <-gaveUp; status.Code(err) != codes.Canceled {
		t.Fatalf("got %v", err)
	}
	fails(csierr.OperationPending)(t, create(t.Context(), "a"))

	// B-11: a call for another object does not wait.
	other := inBackground(func() error { return create(t.Context(), "b") })
	<-working
	close(finish)
	must(t, <-other)
	csitest.Await(t, "the lock is free", func() bool { return create(t.Context(), "a") == nil })
}

func TestAStoppedServerFinishesItsCallsAndRemovesItsSocket(t *testing.T) { // B-29
	before := goleak.IgnoreCurrent()
	working, finish := make(chan struct{}), make(chan struct{})
	s, create := serveCreate(t, func() error {
		close(working)
		<-finish
		return nil
	})
	answer := inBackground(func() error { return create(t.Context(), "a") })
	<-working
	ended := inBackground(s.stop)
	csitest.Await(t, "the socket is gone", func() bool {
		return os.IsNotExist(csitest.Err(os.Lstat(s.path)))
	})
	select {
	case <-ended:
		t.Fatal("the server ended while a call was at work")
	default:
	}
	close(finish)
	if err := <-answer; err != nil {
		t.Errorf("the call at work got %v", err)
	}
	must(t, <-ended)
	_ = s.conn.Close()
	goleak.VerifyNone(t, before)
}

func TestASilentClientDoesNotDelayTheShutdown(t *testing.T) { // B-29
	s := serve(t, &csiServer{})
	csitest.Got(csi.NewIdentityClient(s.conn).Probe(t.Context(), &csi.ProbeRequest{}))(t)
	conn := csitest.Got(net.Dial("unix", s.path))(t)
	defer func() { _ = conn.Close() }()
	select {
	case err := <-inBackground(s.stop):
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Error("the server waits for a silent client")
	}
}

func TestEveryLoggedRequestAndResponseIsRedacted(t *testing.T) { // B-15
	messages := 0
	for i := range csi.File_csi_proto.Messages().Len() {
		name := csi.File_csi_proto.Messages().Get(i).FullName()
		kind := csitest.Got(protoregistry.GlobalTypes.FindMessageByName(name))(t)
		message := kind.New()
		plantCanaries(message, 5)
		messages++
		if text := (redacted{message.Interface()}).LogValue().String(); strings.Contains(text, canary) {
			t.Errorf("%s: %s", name, text)
		}
	}
	if messages < 50 {
		t.Errorf("only %d messages were looked at", messages)
	}
}

func plantCanaries(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch {
		case field.IsMap():
			if strings.HasSuffix(string(field.Name()), "secrets") {
				m.Mutable(field).Map().Set(protoreflect.ValueOfString("key").MapKey(),
					protoreflect.ValueOfString(canary))
			}
		case field.Name() == "mount_flags":
			m.Mutable(field).List().Append(protoreflect.ValueOfString(canary))
		case field.Message() == nil || depth == 0:
		case field.IsList():
			plantCanaries(m.Mutable(field).List().AppendMutable().Message(), depth-1)
		default:
			plantCanaries(m.Mutable(field).Message(), depth-1)
		}
	}
}

func TestLogLevelsDependOnMethodAndCode(t *testing.T) {
	for _, test := range []struct {
		method string
		err    error
		want   slog.Level
	}{
		{"Probe", nil, slog.LevelDebug},
		{"NodeGetVolumeStats", nil, slog.LevelDebug},
		{"ListVolumes", nil, slog.LevelDebug},
		{"CreateVolume", nil, slog.LevelInfo},
		{"CreateVolume", csierr.New(csierr.OperationPending, "x"), slog.LevelInfo},
		{"CreateVolume", csierr.New(csierr.CapacityOutOfRange, "x"), slog.LevelWarn},
		{"Probe", csierr.Coded(codes.FailedPrecondition, csierr.TokenRejected, "x"), slog.LevelDebug},
		{"CreateVolume", csierr.New(csierr.RackError, "x"), slog.LevelError},
	} {
		if got := levelOf(test.method, test.err); got != test.want {
			t.Errorf("levelOf(%s, %v) = %v, want %v", test.method, test.err, got, test.want)
		}
	}
}

func TestLockKeysNameTheChangedObject(t *testing.T) { // CP-14, CU-9, DV-5, CS-7, DS-5, NS-9, NU-6
	upper := strings.ToUpper(racktest.Disk)
	for _, test := range []struct {
		req  any
		want string
	}{
		{&csi.CreateVolumeRequest{Name: "a"}, "volume name a"},
		{&csi.CreateSnapshotRequest{Name: "a", SourceVolumeId: racktest.Disk}, "snapshot name a"},
		{&csi.DeleteSnapshotRequest{SnapshotId: racktest.Snapshot}, "snapshot " + racktest.Snapshot},
		{&csi.DeleteVolumeRequest{VolumeId: upper}, "volume " + racktest.Disk},
		{&csi.ControllerPublishVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.NodeStageVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.NodeUnstageVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.NodePublishVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.NodeUnpublishVolumeRequest{VolumeId: racktest.Disk}, "volume " + racktest.Disk},
		{&csi.NodeGetVolumeStatsRequest{VolumeId: racktest.Disk}, ""},
		{&csi.ControllerGetVolumeRequest{VolumeId: racktest.Disk}, ""},
		{&csi.DeleteVolumeRequest{}, ""},
		{&csi.ListVolumesRequest{}, ""},
	} {
		if got := lockKey(test.req); got != test.want {
			t.Errorf("lockKey(%T) = %q, want %q", test.req, got, test.want)
		}
	}
}

func TestOnlyControllerCallsGetADeadline(t *testing.T) {
	for method, want := range map[string]bool{
		"/csi.v1.Controller/CreateVolume": true, "/csi.v1.Node/NodeStageVolume": false,
	} {
		_, _ = limitTime(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method},
			func(ctx context.Context, _ any) (any, error) {
				if _, got := ctx.Deadline(); got != want {
					t.Errorf("%s: a deadline: %v", method, got)
				}
				return nil, nil
			})
	}
}

func TestFieldsOverTheirLimitAreRefused(t *testing.T) { // B-1, B-2, B-5
	long := strings.Repeat("x", 129)
	flagged := csitest.Filesystem("ext4")
	flagged.GetMount().MountFlags = []string{long}
	big := map[string]string{"k": strings.Repeat("x", 4096)}
	for _, test := range []struct {
		name string
		req  interface{ ProtoReflect() protoreflect.Message }
		want string // the field; empty means accepted
	}{
		{"a long id", &csi.DeleteVolumeRequest{VolumeId: long}, "volume_id"},
		{"an id of 128 bytes", &csi.DeleteVolumeRequest{VolumeId: long[1:]}, ""},
		{"an id is counted in bytes, not letters", &csi.CreateVolumeRequest{Name: strings.Repeat("é",
			65)}, "name"},
		{"a node's 256 bytes", &csi.ControllerPublishVolumeRequest{NodeId: long + long[2:]}, ""},
		{"a node's 257 bytes", &csi.ControllerPublishVolumeRequest{NodeId: long + long[1:]}, "node_id"},
		{"a long path (B-4)", &csi.NodeStageVolumeRequest{StagingTargetPath: strings.Repeat("/abc",
			300)}, ""},
		{"large parameters", &csi.CreateVolumeRequest{Parameters: big}, "parameters"},
		{"large secrets", &csi.CreateVolumeRequest{Secrets: big}, "secrets"},
		{"large segments", &csi.CreateVolumeRequest{AccessibilityRequirements: &csi.TopologyRequirement{
			Requisite: []*csi.Topology{{Segments: big}}}}, ""},
		{"a long filesystem", &csi.CreateVolumeRequest{VolumeCapabilities: []*csi.VolumeCapability{
			csitest.Filesystem(long)}}, "fs_type"},
		{"a long mount flag", &csi.NodeStageVolumeRequest{VolumeCapability: flagged}, ""},
		{"a negative size", &csi.CreateVolumeRequest{CapacityRange: csitest.Range(-1, 0)},
			"required_bytes"},
		{"a negative count", &csi.ListVolumesRequest{MaxEntries: -1}, "max_entries"},
		{"a long token is a bad token (LV-2)", &csi.ListVolumesRequest{StartingToken: long}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := limitProblem(test.req.ProtoReflect())
			if test.want == "" {
				must(t, err)
				return
			}
			if fails(csierr.FieldInvalid, test.want)(t, err); strings.Contains(err.Error(), "xxx") {
				t.Errorf("%v shows the value", err)
			}
		})
	}
}

func TestAnEndpointMustBeAUnixURLWithAnAbsolutePath(t *testing.T) { // B-18, B-17
	for _, bad := range []string{
		"", "unix://csi/csi.sock", "unix:/csi/csi.sock", "unix:csi.sock", "/csi/csi.sock",
		"csi.sock",
		"tcp://127.0.0.1:9000", "unix:///csi/csi", "unix:///csi/csi.socket", "unix://host/csi.sock",
		"unix:///csi/csi.sock?x=y", "unix:///csi/csi.sock#x", "http:///csi.sock",
		"unix://u@/csi.sock",
		"unix:///" + strings.Repeat("x", 120) + ".sock", "unix:///a\x00.sock", "unix:///%zz.sock",
	} {
		if path, err := socketPath(bad); err == nil {
			t.Errorf("socketPath(%q) = %q", bad, path)
		}
	}
	path, err := socketPath("unix:///csi/csi.sock")
	if err != nil || path != "/csi/csi.sock" {
		t.Errorf("got %q, %v", path, err)
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	var list []string
	for _, e := range csitest.Got(os.ReadDir(dir))(t) {
		list = append(list, e.Name())
	}
	return list
}

func TestAFileAtTheSocketsPathIsNotRemoved(t *testing.T) { // B-19
	dir := t.TempDir()
	path := filepath.Join(dir, "csi.sock")
	must(t, os.WriteFile(path, []byte("precious"), 0o600))
	csitest.Says(t, csitest.Err(listenUnix(path)), "no socket")
	if content, err := os.ReadFile(path); string(content) != "precious" {
		t.Errorf("the file now holds %q, %v", content, err)
	}
	err := csitest.Err(listenUnix(filepath.Join(dir, "nowhere", "csi.sock")))
	if csitest.Says(t, err, "directory"); err != nil && strings.Contains(err.Error(), dir) {
		t.Errorf("%v shows the path", err)
	}
}

func TestOnlyOneOfManyProcessesServesTheSocket(t *testing.T) { // B-19
	for range 50 {
		path := filepath.Join(t.TempDir(), "csi.sock")
		left := csitest.Got(listenUnix(path))(t)
		// The closed listener leaves a stale socket, which every call of listenUnix tries to remove.
		_ = left.(*ownSocket).UnixListener.Close()
		servers, start := make(chan net.Listener, 16), make(chan struct{})
		var all sync.WaitGroup
		for range cap(servers) {
			all.Go(func() {
				<-start
				if listener, err := listenUnix(path); err == nil {
					servers <- listener
				} else {
					csitest.Says(t, err, "another process")
				}
			})
		}
		close(start)
		all.Wait()
		if len(servers) != 1 {
			t.Fatalf("%d of them serve at one socket", len(servers))
		}
		must(t, csitest.Got(net.Dial("unix", path))(t).Close())
		_ = (<-servers).Close()
		if got := names(t, filepath.Dir(path)); len(got) != 0 {
			t.Fatalf("left behind: %v", got)
		}
	}
}

func TestAnEndingProcessDoesNotRemoveItsSuccessorsSocket(t *testing.T) { // B-19
	path := filepath.Join(t.TempDir(), "csi.sock")
	old := csitest.Got(listenUnix(path))(t)
	// Remove the first socket, as if another process had replaced it.
	must(t, os.Remove(path))
	successor := csitest.Got(listenUnix(path))(t)
	_ = old.Close()
	must(t, csitest.Got(net.Dial("unix", path))(t).Close())
	_ = successor.Close()
}

func TestListeningFailsIfTheSocketsDirectoryStaysLocked(t *testing.T) {
	dir := t.TempDir()
	held := csitest.Got(os.Open(dir))(t)
	t.Cleanup(func() { _ = held.Close() })
	must(t, syscall.Flock(int(held.Fd()), syscall.LOCK_EX))
	csitest.Says(t, csitest.Err(listenUnix(filepath.Join(dir, "csi.sock"))),
		"another process has been starting there")
}
