package driver

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestATokenOfAnyFormIsRedacted(t *testing.T) { // B-15
	for _, token := range []string{"x", "hunter2", "tweetytweety", "tweetytweety-without-a-prefix",
		`tweety"tweety\tweety`, "tweety<tweety>&tweety", "tweety***tweety", "a.b+c(d)e[f]$tweety",
		strings.Repeat("tweety", 600), "oxide-token-a/b+tweetytweety==", `oxide-token-a"tweetytweety`,
		"oxide-token-a<tweetytweety>&x", `oxide-token-\tweetytweety`, "oxide-token-,{tweetytweety}"} {
		h := &hidden{}
		h.add(token)
		asJSON, err := json.Marshal(token)
		if err != nil {
			t.Fatal(err)
		}
		for _, shown := range []string{token, "Bearer " + token, token + token,
			fmt.Sprintf("%q", token), string(asJSON), fmt.Sprintf("%.80q", token),
			fmt.Sprintf("%q", string(asJSON)), fmt.Sprintf("%q", fmt.Sprintf("%q", token)),
			csierr.Plain("no such project " + token)} {
			clean := h.text("1: " + shown + " :2")
			if strings.Contains(clean, token) || strings.Contains(clean, "tweetytweety") ||
				!strings.HasPrefix(clean, "1: ") || !strings.HasSuffix(clean, " :2") {
				t.Errorf("%.80q is shown as %.80q", shown, clean)
			}
		}
	}
}

func TestOldTokensAreRedactedToo(t *testing.T) { // B-15
	h := &hidden{}
	for n := range maxTokens {
		h.add(fmt.Sprintf("tweety-%d", n))
	}
	for n := range maxTokens {
		if got := h.text(fmt.Sprintf("the token tweety-%d.", n)); strings.Contains(got, "tweety") {
			t.Errorf("token number %d, with a limit of %d, is shown: %s", n, maxTokens, got)
		}
	}
	h.add("tweety-0")
	if got := len(h.tokens); got != maxTokens {
		t.Errorf("%d tokens are kept", got)
	}
	h.add("another")
	if got := len(h.tokens); got != maxTokens || h.text("another") != "***" {
		t.Errorf("%d tokens are kept: %q", got, h.tokens)
	}
}

func TestNoTokenIsLeftInAnyText(t *testing.T) { // B-15
	rapid.Check(t, func(t *rapid.T) {
		h := &hidden{}
		word := rapid.StringOfN(rapid.RuneFrom([]rune("ab\"\\<é")), 1, 30, -1)
		tokens := rapid.SliceOfN(word, 1, 3).Draw(t, "tokens")
		for _, token := range tokens {
			h.add(token)
		}
		text := rapid.SliceOf(rapid.OneOf(word, rapid.SampledFrom(tokens))).Draw(t, "text")
		clean := h.text(strings.Join(text, " "))
		for _, token := range tokens {
			if strings.Contains(clean, token) {
				t.Fatalf("%q of %q is left in %q", token, tokens, clean)
			}
		}
	})
}

// A server may repeat a token, and another that begins like it, and every text is cut somewhere.
func TestNoPartOfATokenIsLeftInATruncatedText(t *testing.T) { // B-15
	rapid.Check(t, func(t *rapid.T) {
		h := &hidden{}
		token := rapid.StringOfN(rapid.RuneFrom([]rune(`ab"\<-0`)), minPrefix, 30, -1).Draw(t, "token")
		h.add(token)
		var text strings.Builder
		for range rapid.IntRange(1, 5).Draw(t, "pieces") {
			text.WriteString(token[:rapid.IntRange(minPrefix, len(token)).Draw(t, "length")])
			text.WriteString(rapid.SampledFrom([]string{"", " ", "-", `"`}).Draw(t, "between"))
		}
		cut := text.String()[:rapid.IntRange(0, text.Len()).Draw(t, "cut")]
		clean := h.text(cut)
		for n := range len(token) - minPrefix + 1 {
			if part := token[n:][:minPrefix]; strings.Contains(clean, part) {
				t.Fatalf("%q of %q, which %q has, is left in %q", part, token, cut, clean)
			}
		}
	})
}

func TestAnEchoedTokenIsInNoStatus(t *testing.T) { // B-16
	h := &hidden{}
	h.add("Internal")
	s := serve(t, &csiServer{hidden: h, Controller: oddController{create: func() error {
		return csierr.New(csierr.Internal, "the rack says Internal")
	}}})
	err := csitest.Call(t.Context(), csi.NewControllerClient(s.conn), &csi.CreateVolumeRequest{})
	fails(csierr.Internal)(t, err)
	if strings.Contains(err.Error(), "says Internal") {
		t.Errorf("the token is shown: %v", err)
	}
}

type showsToken struct{ token string }

func (s showsToken) LogValue() slog.Value { return slog.StringValue("a value with " + s.token) }

func TestATokenIsInNoLogLine(t *testing.T) { // B-15
	const token = "tweetytweety-without-a-prefix"
	for _, asJSON := range []bool{false, true} {
		book := &logBook{}
		h := &hidden{}
		h.add(token)
		log := newLog(Config{LogJSON: asJSON}, h, book)
		log.With("with", token).Info("message "+token, "error", errors.New("error "+token),
			"text", token, "value", showsToken{token}, "list", []string{token},
			slog.Group("group", "inner", token), "visible", 1984)
		if text := book.String(); strings.Contains(text, "tweety") || !strings.Contains(text, "1984") {
			t.Errorf("the log has %s", text)
		}
	}
}
