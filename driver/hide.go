package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// hidden keeps the tokens that this process has used, and takes them out of what is shown. What
// answers in the rack's place may send a request back to us, and a token need not look like one.
type hidden struct {
	mu sync.Mutex
	// guarded by mu, the latest last
	tokens []string
	// guarded by mu: the tokens in every way in which they may be written
	words []string
}

const (
	// mostHidden is how many tokens are known at once. An answer with an older one is not awaited
	// any more.
	mostHidden = 16
	// hiddenStart is how much of a token is enough to know it by where the rest is cut off.
	hiddenStart = 12
)

// add takes note of a token that is about to be sent.
func (h *hidden) add(token string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if token == "" || slices.Contains(h.tokens, token) {
		return
	}
	h.tokens = append(h.tokens, token)
	h.tokens = h.tokens[max(0, len(h.tokens)-mostHidden):]
	h.words = nil
	for _, t := range h.tokens {
		h.words = append(h.words, t, inQuotes(strconv.Quote(t)), inJSON(t))
	}
	// Of two that begin alike the longer one has to go first.
	slices.SortFunc(h.words, func(a, b string) int { return len(b) - len(a) })
	h.words = slices.Compact(h.words)
}

func inQuotes(quoted string) string { return quoted[1 : len(quoted)-1] }

func inJSON(text string) string {
	var b bytes.Buffer
	// A string can always be written, and a buffer takes it.
	_ = json.NewEncoder(&b).Encode(text)
	return inQuotes(strings.TrimSpace(b.String()))
}

// text is the text without tokens.
func (h *hidden) text(text string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, word := range h.words {
		text = without(text, word)
	}
	return csierr.WithoutTokens(text)
}

// without replaces a word, and a start of it that something has cut off.
func without(text, word string) string {
	start := word[:min(len(word), hiddenStart)]
	var clean strings.Builder
	for {
		before, after, found := strings.Cut(text, start)
		clean.WriteString(before)
		if !found {
			return clean.String()
		}
		clean.WriteString("***")
		rest := word[len(start):]
		for rest != "" && after != "" && rest[0] == after[0] {
			rest, after = rest[1:], after[1:]
		}
		text = after
	}
}

// attribute is an attribute of a line in the log, without tokens.
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

// intercept takes the tokens out of what a caller is told of an error, behind its reason, which is
// the driver's own word.
func (h *hidden) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, req)
	if err == nil {
		return answer, nil
	}
	failure := csierr.From(err, csierr.Internal)
	return nil, failure.WithText(h.text(failure.Error()))
}

// hiddenWriter writes without tokens what is written to it in one piece.
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
