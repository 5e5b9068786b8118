package csierr

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestMessagesAreOneLineOfLimitedLength(t *testing.T) {
	err := New(Internal, "a\nb\x00c\xff %s", strings.Repeat("x", 5000))
	message := status.Convert(err).Message()
	if !strings.HasPrefix(message, "Internal: a b c� x") || len(message) > 1100 {
		t.Errorf("got %d bytes: %.60q", len(message), message)
	}
}

func TestConvertGivesEveryErrorAReasonAndACode(t *testing.T) {
	for _, test := range []struct {
		err     error
		code    codes.Code
		message string
	}{
		{errors.New("bare"), codes.Internal, "Internal: bare"},
		{status.Error(codes.Unknown, "whatever"), codes.Internal, "Internal: "},
		{status.FromContextError(context.DeadlineExceeded).Err(), codes.DeadlineExceeded,
			"DeadlineExceeded: context"},
		{status.FromContextError(context.Canceled).Err(), codes.Canceled, "Canceled: context"},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), codes.DeadlineExceeded,
			"DeadlineExceeded: wait: context"},
		{fmt.Errorf("wait: %w", context.Canceled), codes.Canceled, "Canceled: wait: context"},
		{status.Error(codes.Unimplemented, "method X not implemented"), codes.Unimplemented,
			"NotSupported: method X"},
		{status.Error(codes.NotFound, "lost"), codes.NotFound, "Internal: lost"},
		{New(VolumeNotFound, "lost"), codes.NotFound, "VolumeNotFound: lost"},
		{Coded(codes.Aborted, VolumeNotFound, "lost"), codes.Aborted, "VolumeNotFound: lost"},
		{fmt.Errorf("look: %w", Coded(codes.Aborted, VolumeNotFound, "lost")), codes.Aborted,
			"VolumeNotFound: look: lost"},
		{New(FilesystemDamaged, "mount: structure needs cleaning"), codes.Internal,
			"FilesystemDamaged: mount: structure needs cleaning; take a snapshot, and repair a copy of " +
				"the disk first: docs/howto/repair-a-filesystem.md"},
		{New(StillMounted, "unstage: %w", New(DeviceHeld, "held")), codes.Internal,
			"StillMounted: unstage: held"},
	} {
		s := status.Convert(Convert(test.err, Internal))
		if s.Code() != test.code || !strings.HasPrefix(s.Message(), test.message) {
			t.Errorf("%v: got %s %q, want %s %q", test.err, s.Code(), s.Message(), test.code, test.message)
		}
	}
	if err := Convert(nil, Internal); err != nil {
		t.Errorf("no error became %v", err)
	}
}

func TestParseMessageSkipsKubernetesPrefixes(t *testing.T) {
	for text, want := range map[string][2]string{
		"DiskNotBlank: the disk: 7": {"DiskNotBlank", "the disk: 7"},
		`MountDevice failed for volume "pv" : rpc error: code = Aborted desc = DiskBusy: later`: {
			"DiskBusy", "later"},
		"rpc error: code = Unavailable desc = EffectUnknown: repeat the call: DiskBusy: later": {
			"EffectUnknown", "repeat the call: DiskBusy: later"},
		"rpc error: code = DeadlineExceeded desc = context deadline exceeded": {},
		"Multi-Attach error for volume":                                       {},
		"NoReason: x":                                                         {}, "DiskBusy": {}, "": {},
	} {
		reason, sentence, ok := ParseMessage(text)
		if string(reason) != want[0] || sentence != want[1] || ok != (want[0] != "") {
			t.Errorf("%q: got %q, %q, %t", text, reason, sentence, ok)
		}
	}
	for _, reason := range Reasons() {
		got, sentence, ok := ParseMessage(Message(New(reason, "it is so")))
		if got != reason || !strings.HasPrefix(sentence, "it is so") || !ok {
			t.Errorf("%s: got %q, %q, %t", reason, got, sentence, ok)
		}
	}
}

// FuzzPlain checks that Plain returns one short line without a token, and is idempotent.
func FuzzPlain(f *testing.F) {
	f.Add("a\u202eb")
	f.Fuzz(func(t *testing.T, text string) {
		got := Plain(text)
		if !utf8.ValidString(got) || strings.ContainsAny(got, "\n\r\t\x00\x7f\u202e") ||
			len(got) > 1100 || rackToken.MatchString(got) {
			t.Fatalf("Plain(%q) = %q", text, got)
		}
		if again := Plain(got); len(got) < 1000 && again != got {
			t.Fatalf("Plain(%q) = %q, then %q", text, got, again)
		}
	})
}

func TestOutputTailReturnsOneQuotedLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "no output",
		" \n\t":                  "no output",
		"a\n\n b":                `"a b"`,
		strings.Repeat("x", 400): `"…` + strings.Repeat("x", 300) + `"`,
	} {
		if got := OutputTail(in); got != want {
			t.Errorf("OutputTail(%q) = %q", in, got)
		}
	}
}

// entry matches a section of docs/reasons.md, and definition matches a constant of reasons.go.
var (
	entry      = regexp.MustCompile("### `(\\w+)`\n\n`(\\w+)`.*\\.\n[^#]+\\.\n\nDo: ([^#]+)\n")
	definition = regexp.MustCompile(`\t(\w+) +Reason = "(\w+)"`)
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTheDocumentationListsEveryReasonWithItsCodeAndAdvice(t *testing.T) {
	page := read(t, "../../docs/reasons.md")
	var explained []Explanation
	for _, m := range entry.FindAllStringSubmatch(page, -1) {
		e := Explanation{Reason: Reason(m[1]), Do: strings.Join(strings.Fields(m[3]), " ")}
		name := strings.Replace(m[2], "CANCELED", "CANCELLED", 1) // as gRPC spells it
		if err := e.Code.UnmarshalJSON([]byte(`"` + name + `"`)); err != nil {
			t.Errorf("%s: %v", e.Reason, err)
		}
		explained = append(explained, e)
	}
	if n := strings.Count(page, "\n### "); n != len(explained) {
		t.Errorf("%d of %d entries have a code, a meaning, and what to do", len(explained), n)
	}
	if diff := cmp.Diff(table, explained); diff != "" {
		t.Errorf("docs/reasons.md has other reasons, codes or advice (-table +page):\n%s", diff)
	}
}

// A test names a reason as the constant csierr.X or, in proofs/corpus, as the text "X".
func TestReasonsAreListedInOrderAndEachHasATest(t *testing.T) {
	var tests strings.Builder
	for _, pattern := range []string{"driver/*", "driver/*/*", "internal/rack/*", "internal/volume/*",
		"proofs/corpus/*"} {
		files, err := filepath.Glob("../../" + pattern + "_test.go")
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, file := range files {
			tests.WriteString(read(t, file))
		}
	}
	var defined, explained []Reason
	for _, m := range definition.FindAllStringSubmatch(read(t, "reasons.go"), -1) {
		defined = append(defined, Reason(m[2]))
		named := regexp.MustCompile(`csierr\.` + m[1] + `\b|"` + m[2] + `"`)
		if !named.MatchString(tests.String()) {
			t.Errorf("no test causes %s", m[2])
		}
	}
	for _, e := range table {
		explained = append(explained, e.Reason)
	}
	if diff := cmp.Diff(defined, explained); diff != "" {
		t.Errorf("the table is not the constants in their order (-constants +table):\n%s", diff)
	}
}
