package csierr

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestAMessageIsOneBoundedLine(t *testing.T) {
	err := New(Internal, "a\nb\x00c\xff %s", strings.Repeat("x", 5000))
	message := status.Convert(err).Message()
	if !strings.HasPrefix(message, "Internal: a b c� x") || len(message) > 1100 {
		t.Errorf("got %d bytes: %.60q", len(message), message)
	}
}

func TestEveryErrorGetsAReasonAndACode(t *testing.T) {
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
			t.Errorf("%v: got %s %q, want %s %q", test.err, s.Code(), s.Message(), test.code,
				test.message)
		}
	}
	if err := Convert(nil, Internal); err != nil {
		t.Errorf("no error became %v", err)
	}
}

func TestAWrappedReasonIsRecognized(t *testing.T) {
	err := fmt.Errorf("stage: %w", New(DeviceHeld, "held"))
	if !Has(err, DeviceHeld) || Has(err, DeviceLocked) || Has(nil, "") || ReasonOf(err) != DeviceHeld {
		t.Errorf("got the reason %q", ReasonOf(err))
	}
}

func TestAMessageIsParsedWhereverKubernetesQuotesIt(t *testing.T) {
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

// FuzzPlain checks that anything can be shown once it is plain, and that plain text stays as it is.
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

func TestOutputTail(t *testing.T) {
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
