package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// hidden redacts the tokens that this process has used. A server in the rack's place may echo a
// request, and no pattern matches every token.
type hidden struct {
	mu sync.Mutex
	// guarded by mu; the latest is last
	tokens []string
	// guarded by mu; the tokens in every encoding in which they may appear
	words []string
	// guarded by mu; matches the beginning of any of the words
	starts *regexp.Regexp
}

const (
	// maxTokens is how many tokens are kept. Responses to requests with older tokens are no longer
	// expected.
	maxTokens = 16
	// minPrefix is how much of a truncated token is enough to recognize it.
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

// beginning returns as much of a word as is enough to recognize it.
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

// withoutWords redacts every text that begins like one of the words. It searches at every position,
// because two tokens may overlap.
//
// The caller holds h.mu.
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

// length returns how many bytes are redacted of a text that begins like one of the words: those
// that equal a word and, after a truncated word, those that may be its rest in another encoding.
//
// The caller holds h.mu.
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

// restOfWord matches up to a space, or a quote that is not escaped.
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

// intercept redacts the tokens in the text of an error, except for the reason, which is a word of
// the driver.
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
