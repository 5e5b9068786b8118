package report

import (
	"io"
	"strings"
	"unicode"
)

// Plain replaces everything in a text that a terminal or a page would interpret instead of
// showing it: control characters except line feeds and tabs, invisible marks, some of which
// change the direction of writing, and bytes that are not UTF-8. Texts of a rack may contain any
// of them.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) ||
			unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// PlainWriter writes its text through Plain, without the secrets of Redact, which may be nil. Each
// Write must consist of whole characters.
type PlainWriter struct {
	To     io.Writer
	Redact *strings.Replacer
}

// Write writes the plain text.
func (w PlainWriter) Write(text []byte) (int, error) {
	clean := string(text)
	if w.Redact != nil {
		clean = w.Redact.Replace(clean)
	}
	if _, err := io.WriteString(w.To, Plain(clean)); err != nil {
		return 0, err
	}
	return len(text), nil
}
