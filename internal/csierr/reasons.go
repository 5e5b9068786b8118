package csierr

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Reason is the first word of every error that a CO sees. Dashboards and documentation refer to it;
// the sentence after it is for people.
type Reason string

// Explanation explains a reason. Its texts are Markdown, for the page docs/reasons.md.
type Explanation struct {
	Reason Reason
	Code   codes.Code
	Also   string // the calls in which CSI requires another code (see Coded)
	Means  string
	Do     string // what a person has to do: "Nothing; …" where repeating the call suffices
}

// section is a part of the page.
type section struct {
	title, intro string
	reasons      []Explanation
}

// sections contain every reason, in the order of the page.
var sections = []section{requestReasons, stateReasons, rackReasons, nodeReasons}

var explanations = func() map[Reason]Explanation {
	all := map[Reason]Explanation{}
	for _, s := range sections {
		for _, e := range s.reasons {
			all[e.Reason] = e
		}
	}
	return all
}()

// Explain returns the explanation of a reason, and false if the driver has no such reason.
func Explain(reason Reason) (e Explanation, known bool) {
	e, known = explanations[reason]
	return e, known
}

// Reasons returns every reason, in the order of the alphabet.
func Reasons() []Reason { return slices.Sorted(maps.Keys(explanations)) }

// ParseMessage parses a message of the driver, "Reason: sentence", as others show it: Kubernetes
// puts words of its own before it ("rpc error: code = Aborted desc = "). It returns false for a
// text without a known reason.
func ParseMessage(text string) (reason Reason, sentence string, ok bool) {
	if _, after, found := strings.Cut(text, " desc = "); found {
		text = after
	}
	word, sentence, found := strings.Cut(text, ": ")
	reason = Reason(word)
	if _, known := explanations[reason]; !found || !known {
		return "", "", false
	}
	return reason, sentence, true
}
