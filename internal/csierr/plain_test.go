package csierr

import (
	"strings"
	"testing"
	"unicode/utf8"
)

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
