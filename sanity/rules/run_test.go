//go:build linux

package rules

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// answering opens the checks of a rack that answers every request alike.
func answering(t *testing.T, status int, body string) *Rack {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Request-Id", "1")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(server.Close)
	r, err := Open(Config{Host: server.URL, Token: "oxide-token-secret", Project: "p", Mark: "m"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestACheckThatDidNotReachTheRackIsNotPassed(t *testing.T) {
	ping := func(c *Check) { _, _ = c.Client.Ping(c.ctx) }
	for name, test := range map[string]struct {
		check func(*Check)
		calls []string
		want  Status
		says  string
	}{
		"it asked":                {ping, []string{"ping"}, Passed, ""},
		"it asked nothing":        {func(*Check) {}, []string{"ping"}, Failed, "no answer to ping"},
		"it asked something else": {ping, []string{"disk_view"}, Failed, "no answer to disk_view"},
		"it was told something else": {func(c *Check) { ping(c); c.Errorf("no") },
			[]string{"ping"}, Failed, "no"},
		"it went wrong": {func(c *Check) { ping(c); _ = *(*oxide.Disk)(nil) }, []string{"ping"}, Failed,
			"could not go on"},
		"it could not": {func(c *Check) { c.NotTested("why") }, []string{"ping"}, NotTested, "why"},
		"it may not":   {func(c *Check) { c.Blocked("why") }, []string{"ping"}, Blocked, "why"},
		"it failed before it could not": {func(c *Check) { c.Errorf("no"); c.Blocked("why") },
			[]string{"ping"}, Failed, "no"},
	} {
		t.Run(name, func(t *testing.T) {
			got := answering(t, 200, `{"status":"ok"}`).Run(t.Context(),
				Rule{ID: "A00", Calls: test.calls, Check: test.check})
			if got.Status != test.want || !strings.Contains(got.Reason, test.says) || got.Tries != 1 {
				t.Errorf("got %s after %d tries: %q", got.Status, got.Tries, got.Reason)
			}
		})
	}
	// Somebody else answers, who gives no request an ID.
	r := answering(t, 200, `{"status":"ok"}`)
	r.recorder.next = anonymous{r.recorder.next}
	rule := Rule{ID: "A00", Calls: []string{"ping"}, Check: ping}
	if got := r.Run(t.Context(), rule); got.Status != Failed {
		t.Errorf("an answer without the rack's request ID: %s", got.Status)
	}
}

// anonymous takes the IDs from answers.
type anonymous struct{ next http.RoundTripper }

func (a anonymous) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := a.next.RoundTrip(req)
	if err == nil {
		resp.Header.Del("X-Request-Id")
	}
	return resp, err
}

func TestACheckIsMadeAgainOnlyIfItFailedWhileTheRackWasBusy(t *testing.T) {
	ask := func(c *Check) {
		_, err := c.Client.Ping(c.ctx)
		c.must("ping", err)
	}
	rule := Rule{ID: "A00", Calls: []string{"ping"}, Check: ask}
	for status, want := range map[int]int{500: 1, 404: 1, 429: tries, 502: tries, 503: tries,
		504: tries} {
		got := answering(t, status, `{"message":"no","request_id":"1"}`).Run(t.Context(), rule)
		if got.Tries != want || got.Status != Failed || len(got.Exchanges) != want {
			t.Errorf("HTTP %d: %s after %d tries with %d exchanges, want %d", status, got.Status,
				got.Tries, len(got.Exchanges), want)
		}
	}
}

func TestAnAnswerThatIsKeptHasNoToken(t *testing.T) {
	r := answering(t, 400, strings.Repeat(" ", answerExcerpt-5)+"oxide-token-secret")
	_, _ = r.Client.Ping(t.Context())
	for _, e := range r.Exchanges() {
		if strings.Contains(e.Answer, "oxide-token-") || len(e.Answer) > answerExcerpt {
			t.Errorf("kept %d bytes: …%q", len(e.Answer), e.Answer[len(e.Answer)-20:])
		}
	}
}
