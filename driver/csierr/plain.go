package csierr

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"unicode"
)

// rackToken is what a token of the rack looks like, wherever it may have got into.
var rackToken = regexp.MustCompile(`oxide-token-[A-Za-z0-9_.-]*`)

// Plain makes text fit to be shown to anybody: one line of at most about 1000 bytes, valid UTF-8,
// no token. The text may come from whatever answered in the rack's place.
func Plain(text string) string {
	const most = 1000
	text = WithoutTokens(strings.ToValidUTF8(text, "�"))
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strings.TrimSpace(text)
}

// WithoutTokens replaces what looks like a token of the rack by ***.
func WithoutTokens(text string) string { return rackToken.ReplaceAllString(text, "***") }

// WithoutPath is an error of the system without the path, which is the operator's value.
func WithoutPath(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// LastWords makes one line of the end of a program's output.
func LastWords(output string) string {
	const most = 300
	words := strings.Join(strings.Fields(output), " ")
	if words == "" {
		return "it said nothing"
	}
	if len(words) > most {
		words = "…" + strings.ToValidUTF8(words[len(words)-most:], "")
	}
	return fmt.Sprintf("%q", words)
}
