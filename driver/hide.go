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

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// hidden redacts the tokens that this process has used. A server in the rack's place may echo a
// request, and a token need not look like one.
type hidden struct {
	mu sync.Mutex
	// guarded by mu; the latest is last
	tokens []string
	// guarded by mu; the tokens in every encoding in which they may appear
	words []string
}

const (
	// maxTokens is how many tokens are kept. No response with an older one is still expected.
	maxTokens = 16
	// minPrefix is how much of a truncated token is enough to recognize it.
	minPrefix = 12
)

// add records a token that is about to be sent.
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
	// Replace the longer of two words with the same beginning first.
	slices.SortFunc(h.words, func(a, b string) int { return len(b) - len(a) })
	h.words = slices.Compact(h.words)
}

func inQuotes(quoted string) string { return quoted[1 : len(quoted)-1] }

func inJSON(text string) string {
	var b bytes.Buffer
	// Encoding a string into a buffer cannot fail.
	_ = json.NewEncoder(&b).Encode(text)
	return inQuotes(strings.TrimSpace(b.String()))
}

// text redacts the tokens in a text.
func (h *hidden) text(text string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, word := range h.words {
		text = strings.ReplaceAll(text, word, "***")
	}
	for _, word := range h.words {
		text = without(text, word[:min(len(word), minPrefix)], h.words)
	}
	return csierr.WithoutTokens(text)
}

// without replaces truncated forms of those words that begin with start: as much as is equal to any
// of them, a token in one of its encodings, and then what may be the rest in another encoding.
func without(text, start string, words []string) string {
	var clean strings.Builder
	for {
		before, _, found := strings.Cut(text, start)
		clean.WriteString(before)
		if !found {
			return clean.String()
		}
		clean.WriteString("***")
		after, equal, whole := text[len(before):], 0, false
		for _, word := range words {
			n := 0
			for n < min(len(word), len(after)) && word[n] == after[n] {
				n++
			}
			if n > equal {
				equal, whole = n, n == len(word)
			}
		}
		if text = after[equal:]; !whole {
			text = text[len(restOfWord.FindString(text)):]
		}
	}
}

// restOfWord matches up to a space, or a quote that is not escaped.
var restOfWord = regexp.MustCompile(`^(\\+[!-~]|[!#-\[\]-~])*`)

// attribute redacts the tokens in a log attribute.
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

// intercept redacts the tokens in the text of an error. The reason is the driver's own word.
func (h *hidden) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, req)
	if err == nil {
		return answer, nil
	}
	failure := csierr.From(err, csierr.Internal)
	return nil, failure.WithText(h.text(failure.Error()))
}

// hiddenWriter redacts the tokens in each write.
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
