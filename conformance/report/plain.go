package report

import (
	"io"
	"strings"
	"unicode"
)

// Plain replaces what a terminal or a page would obey rather than show: control characters but line
// feeds and tabs, invisible marks, of which some turn the direction of writing, and what is no
// UTF-8. Texts of a rack may have any of them.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) ||
			unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// PlainWriter writes Plain text. Each Write has to have whole characters.
type PlainWriter struct{ To io.Writer }

// Write writes what is plain in the text.
func (w PlainWriter) Write(text []byte) (int, error) {
	if _, err := io.WriteString(w.To, Plain(string(text))); err != nil {
		return 0, err
	}
	return len(text), nil
}
