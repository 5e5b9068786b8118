package driver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// interceptors returns the interceptors of every call, outermost first. In this order the log and
// the metrics get the final result, even after a panic, and limitTime limits only the handler.
func (s *csiServer) interceptors() []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{
		logCalls(s.Log),
		s.metrics.intercept,
		s.hidden.intercept,
		finish,
		recoverPanics(s.Log),
		checkLimits,
		s.flight.intercept,
		(&locks{}).intercept,
		limitTime,
	}
}

// finish gives every error a reason, a sentence and one of CSI's codes. Without it, a plain Go
// error reaches the CO as UNKNOWN.
func finish(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any,
	error) {
	answer, err := handler(ctx, req)
	if err != nil {
		return nil, csierr.Convert(err, csierr.Internal)
	}
	return answer, nil
}

// recoverPanics converts a panic to INTERNAL, so that one broken call does not end all others.
func recoverPanics(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (answer any, err error) {
		defer async.Recover(ctx, log, shortMethod(info.FullMethod), &err)
		return handler(ctx, req)
	}
}

// controllerTimeLimit limits a controller call that comes without a deadline, so that no goroutine
// waits for a rack forever.
const controllerTimeLimit = 2 * time.Minute

// limitTime adds a deadline to a controller call that has none. A node call gets no deadline,
// because mkfs must not be interrupted.
func limitTime(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	if _, ok := ctx.Deadline(); !ok && strings.HasPrefix(info.FullMethod, "/csi.v1.Controller/") {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, controllerTimeLimit)
		defer cancel()
	}
	return handler(ctx, req)
}

// shortMethod returns "CreateVolume" for "/csi.v1.Controller/CreateVolume".
func shortMethod(full string) string { return full[strings.LastIndex(full, "/")+1:] }

type flightRecorders struct {
	controller, node *flight.Recorder // nil: nothing is recorded
	instance         string           // the id of this node's instance
}

func (r flightRecorders) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	recorder, f := r.controller, changedBy(req)
	if strings.HasPrefix(info.FullMethod, "/csi.v1.Node/") {
		recorder, f.Instance = r.node, r.instance
	}
	if recorder != nil {
		ctx = flight.With(ctx, recorder, f)
	}
	return handler(ctx, req)
}

func changedBy(req any) flight.Fields {
	f := flight.Fields{
		Volume:   cmp.Or(textIn(req, "source_volume_id"), textIn(req, "volume_id")),
		Instance: textIn(req, "node_id"),
		Snapshot: textIn(req, "snapshot_id"),
		Path:     cmp.Or(textIn(req, "target_path"), textIn(req, "staging_target_path")),
	}
	if r, ok := req.(interface{ GetParameters() map[string]string }); ok {
		f.Claim = volume.Claim(r.GetParameters())
	}
	return f
}

func textIn(req any, field protoreflect.Name) string {
	if message, ok := req.(proto.Message); ok {
		m := message.ProtoReflect()
		if f := m.Descriptor().Fields().ByName(field); f != nil {
			return m.Get(f).String()
		}
	}
	return ""
}

// logCalls logs each call and, at debug level, its messages without secrets and mount flags.
func logCalls(log *slog.Logger) grpc.UnaryServerInterceptor {
	var calls atomic.Int64
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (any, error) {
		method := shortMethod(info.FullMethod)
		call := log.With("method", method, "call", calls.Add(1))
		call.DebugContext(ctx, "called", "request", redacted{req})
		start := time.Now()
		answer, err := handler(ctx, req)
		attrs := append(objects(req), made(answer)...)
		attrs = append(attrs, slog.Duration("took", time.Since(start)))
		if err != nil {
			s := status.Convert(err)
			attrs = append(attrs, slog.String("code", s.Code().String()), slog.String("error", s.Message()))
		}
		call.LogAttrs(ctx, levelOf(method, err), "done", attrs...)
		if err == nil {
			call.DebugContext(ctx, "answered", "response", redacted{answer})
		}
		return answer, err
	}
}

func levelOf(method string, err error) slog.Level {
	asking := method == "Probe" || strings.Contains(method, "Get") ||
		strings.Contains(method, "List") || strings.HasPrefix(method, "Validate")
	switch code := status.Code(err); {
	case code == codes.OK && asking, code == codes.Unimplemented,
		// Kubelet repeats Probe every few seconds, and the background check has already logged the error.
		method == "Probe" && code == codes.FailedPrecondition:
		return slog.LevelDebug
	case code == codes.OK, code == codes.Canceled, code == codes.Aborted:
		return slog.LevelInfo
	case code == codes.Internal:
		return slog.LevelError
	}
	return slog.LevelWarn
}

func objects(req any) []slog.Attr {
	var attrs []slog.Attr
	for _, f := range []struct{ key, field string }{{"name", "name"}, {"volume", "volume_id"},
		{"source", "source_volume_id"}, {"node", "node_id"}, {"snapshot", "snapshot_id"}} {
		if value := textIn(req, protoreflect.Name(f.field)); value != "" {
			attrs = append(attrs, slog.String(f.key, csierr.Plain(value)))
		}
	}
	return attrs
}

// made returns, for the log, the id of the object that a call created. Later calls use this id.
func made(answer any) []slog.Attr {
	if r, ok := answer.(*csi.CreateVolumeResponse); ok && r.GetVolume() != nil {
		return []slog.Attr{slog.String("volume", r.GetVolume().GetVolumeId())}
	}
	if r, ok := answer.(*csi.CreateSnapshotResponse); ok && r.GetSnapshot() != nil {
		return []slog.Attr{slog.String("snapshot", r.GetSnapshot().GetSnapshotId())}
	}
	return nil
}

// redacted wraps a message for the log and redacts it only when the line is written.
type redacted struct{ message any }

// LogValue returns the message as JSON without secrets and mount flags.
func (r redacted) LogValue() slog.Value {
	message, ok := r.message.(proto.Message)
	if !ok {
		return slog.StringValue("not a message")
	}
	message = proto.Clone(message)
	// CSI says that mount flags may be sensitive, but does not mark them as secret.
	_ = protorange.Range(message.ProtoReflect(), func(at protopath.Values) error {
		if m, ok := at.Index(-1).Value.Interface().(protoreflect.Message); ok {
			if flags := m.Descriptor().Fields().ByName("mount_flags"); flags != nil && m.Has(flags) {
				m.Clear(flags)
			}
		}
		return nil
	})
	stripped := protosanitizer.StripSecrets(message).String()
	if !json.Valid([]byte(stripped)) {
		return slog.StringValue("unprintable")
	}
	const most = 64 << 10
	return slog.StringValue(csierr.WithoutTokens(stripped[:min(len(stripped), most)]))
}

// maxMapBytes is CSI's limit for every map without a limit of its own (B-2).
const maxMapBytes = 4 << 10

// fieldLimits lists the string fields whose limit is not volume.MaxStringBytes. 0 means no check
// here: the node checks paths, an invalid starting token gets a code of its own, and CSI limits the
// total size of mount flags.
var fieldLimits = map[protoreflect.Name]int{
	"target_path": 0, "staging_target_path": 0, "volume_path": 0,
	"starting_token": 0, "mount_flags": 0, "node_id": 256,
}

func checkLimits(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	if message, ok := req.(proto.Message); ok {
		if err := limitProblem(message.ProtoReflect()); err != nil {
			return nil, err
		}
	}
	return handler(ctx, req)
}

// limitProblem returns an error for a field that breaks a limit. The error omits the value.
func limitProblem(m protoreflect.Message) (err error) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			err = mapProblem(field, value.Map())
		case field.IsList():
			for i := range value.List().Len() {
				if err == nil {
					err = valueProblem(field, value.List().Get(i))
				}
			}
		default:
			err = valueProblem(field, value)
		}
		return err == nil
	})
	return err
}

func mapProblem(field protoreflect.FieldDescriptor, values protoreflect.Map) (err error) {
	if field.MapValue().Kind() != protoreflect.StringKind || field.Name() == "segments" {
		return nil // segments have rules of their own, per segment
	}
	total := 0
	values.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		total += len(key.String()) + len(value.String())
		return true
	})
	if total > maxMapBytes {
		return csierr.New(csierr.FieldInvalid, "%s has %d bytes; CSI allows %d",
			field.Name(), total, maxMapBytes)
	}
	return nil
}

func valueProblem(field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	switch field.Kind() {
	case protoreflect.MessageKind:
		return limitProblem(value.Message())
	case protoreflect.StringKind:
		most, special := fieldLimits[field.Name()]
		if !special {
			most = volume.MaxStringBytes
		}
		if most > 0 && len(value.String()) > most {
			return csierr.New(csierr.FieldInvalid, "%s has %d bytes; CSI allows %d",
				field.Name(), len(value.String()), most)
		}
	case protoreflect.Int64Kind, protoreflect.Int32Kind:
		if value.Int() < 0 {
			return csierr.New(csierr.FieldInvalid, "%s is negative", field.Name())
		}
	}
	return nil
}

// locks admits one call at a time for each object. The zero value is ready for use.
type locks struct{ held sync.Map }

// intercept returns ABORTED while another call for the same object is in progress. It holds the
// lock until the handler returns, even if the caller has given up, because mkfs may still work on
// the object (B-12).
func (l *locks) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	key := lockKey(req)
	if key == "" {
		return handler(ctx, req)
	}
	if _, taken := l.held.LoadOrStore(key, true); taken {
		return nil, csierr.New(csierr.OperationPending, "another call for %s is in progress; repeat "+
			"this one later", csierr.Plain(key))
	}
	defer l.held.Delete(key)
	// Do not run a canceled call: it could undo the effect of a later call that has already ended.
	// gRPC delivers a cancellation before later calls of the same connection.
	switch ctx.Err() {
	case nil:
		return handler(ctx, req)
	case context.DeadlineExceeded:
		return nil, csierr.New(csierr.DeadlineExceeded, "the deadline passed before the call began; "+
			"nothing was done")
	}
	return nil, csierr.New(csierr.Canceled, "the caller canceled before the call began; nothing was "+
		"done")
}

// lockKey returns a key for the object that a call changes, or "" if the call only reads.
func lockKey(req any) string {
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		return objectKey("volume name", r.GetName())
	case *csi.CreateSnapshotRequest:
		return objectKey("snapshot name", r.GetName())
	case *csi.DeleteSnapshotRequest:
		return objectKey("snapshot", r.GetSnapshotId())
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest,
		*csi.ControllerUnpublishVolumeRequest, *csi.NodeStageVolumeRequest,
		*csi.NodeUnstageVolumeRequest, *csi.NodePublishVolumeRequest,
		*csi.NodeUnpublishVolumeRequest:
		return objectKey("volume", r.(interface{ GetVolumeId() string }).GetVolumeId())
	}
	return ""
}

func objectKey(kind, id string) string {
	if id == "" {
		return ""
	}
	if u, ok := volume.ParseID(id); ok {
		id = u // the case of a UUID does not matter
	}
	return kind + " " + id
}

// hidden redacts the tokens that this process has used, because a server may echo a request. It
// remembers the tokens, because no pattern matches every token.
type hidden struct {
	mu sync.Mutex
	// guarded by mu; the newest token is last
	tokens []string
	// guarded by mu; the tokens in every encoding in which they may appear
	words []string
	// guarded by mu; matches the beginning of any of the words
	starts *regexp.Regexp
}

const (
	// maxTokens limits the tokens that are kept. Responses to requests with older tokens are no longer
	// expected.
	maxTokens = 16
	// minPrefix is how many leading bytes are enough to recognize a truncated token.
	minPrefix = 12
)

func (h *hidden) add(token string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if token == "" || slices.Contains(h.tokens, token) {
		return
	}
	h.tokens = append(h.tokens, token)
	h.tokens = h.tokens[max(0, len(h.tokens)-maxTokens):]
	h.words = nil
	for _, t := range h.tokens {
		h.words = append(h.words, t, inQuotes(strconv.Quote(t)), inJSON(t))
	}
	slices.Sort(h.words)
	h.words = slices.Compact(h.words)
	var starts []string
	for _, word := range h.words {
		starts = append(starts, regexp.QuoteMeta(beginning(word)))
	}
	h.starts = regexp.MustCompile(strings.Join(starts, "|"))
}

func beginning(word string) string {
	for n := range word {
		if n >= minPrefix {
			return word[:n]
		}
	}
	return word
}

func inQuotes(quoted string) string { return quoted[1 : len(quoted)-1] }

func inJSON(text string) string {
	var b bytes.Buffer
	// Encoding a string into a buffer cannot fail.
	_ = json.NewEncoder(&b).Encode(text)
	return inQuotes(strings.TrimSpace(b.String()))
}

func (h *hidden) text(text string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return csierr.WithoutTokens(h.withoutWords(text))
}

// withoutWords redacts each of the words in a text, also truncated ones. It searches at every
// position, because two tokens may overlap.
func (h *hidden) withoutWords(text string) string {
	if h.starts == nil {
		return text
	}
	var clean strings.Builder
	done := 0 // how much of the text is copied or redacted
	for from := 0; ; {
		next := h.starts.FindStringIndex(text[from:])
		if next == nil {
			clean.WriteString(text[done:])
			return clean.String()
		}
		at := from + next[0]
		if at >= done {
			clean.WriteString(text[done:at] + "***")
		}
		done = max(done, at+h.length(text[at:]))
		from = at + 1
	}
}

// length returns how many bytes to redact of a text that begins like one of the words. If the text
// has only a part of the word, the result includes the bytes up to a space or a quote: they may be
// the rest of the word in another encoding.
func (h *hidden) length(text string) int {
	equal, whole := 0, false
	for _, word := range h.words {
		if !strings.HasPrefix(text, beginning(word)) {
			continue
		}
		n := 0
		for n < min(len(word), len(text)) && word[n] == text[n] {
			n++
		}
		if n > equal {
			equal, whole = n, n == len(word)
		}
	}
	if whole {
		return equal
	}
	return equal + len(restOfWord.FindString(text[equal:]))
}

// restOfWord matches the text up to a space or an unescaped quote.
var restOfWord = regexp.MustCompile(`^(\\+[!-~]|[!#-\[\]-~])*`)

func (h *hidden) attribute(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString, slog.KindAny:
		text := a.Value.String()
		if clean := h.text(text); clean != text {
			a.Value = slog.StringValue(clean)
		}
	}
	return a
}

// intercept redacts the tokens in an error's text, but not in its reason, which is a constant.
func (h *hidden) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, req)
	if err == nil {
		return answer, nil
	}
	failure := csierr.From(err, csierr.Internal)
	return nil, failure.WithText(h.text(failure.Error()))
}

type hiddenWriter struct {
	to     io.Writer
	hidden *hidden
}

func (w hiddenWriter) Write(p []byte) (int, error) {
	if _, err := io.WriteString(w.to, w.hidden.text(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}
