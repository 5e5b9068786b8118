package csierr

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"unicode"
)

// rackToken matches a token of the rack, which is any one word of ASCII characters. In a text that
// a program has formatted, a quote that is not escaped ends the token.
var (
	rackToken       = regexp.MustCompile(`oxide-token-(\\+[!-~]|[!#-\[\]-~])*`)
	rackTokenAsSent = regexp.MustCompile(`oxide-token-[!-~]*`)
)

// Plain converts untrusted text to one line of at most about 1000 bytes, valid UTF-8, without
// tokens, and without marks that change the order of what is shown. The text may come from any
// server that answered in the rack's place.
func Plain(text string) string {
	const most = 1000
	// What is cut cannot begin a token: the part of one before the cut is replaced, too.
	text = text[:min(len(text), 2*most)]
	text = rackTokenAsSent.ReplaceAllString(strings.ToValidUTF8(text, "�"), "***")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strings.TrimSpace(text)
}

// WithoutTokens replaces what looks like a token of the rack with ***.
func WithoutTokens(text string) string { return rackToken.ReplaceAllString(text, "***") }

// WithoutPath removes the path from an error of the system, because the path is the operator's
// value.
func WithoutPath(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// OutputTail returns the end of a program's output as one line.
func OutputTail(output string) string {
	const most = 300
	words := strings.Join(strings.Fields(output), " ")
	if words == "" {
		return "no output"
	}
	if len(words) > most {
		words = "…" + strings.ToValidUTF8(words[len(words)-most:], "")
	}
	return fmt.Sprintf("%q", words)
}
