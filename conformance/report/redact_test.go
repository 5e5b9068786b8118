package report

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// canary is a secret with characters that every encoding changes.
const canary = `oxide-token-"7f<3a>&9c'/+%=ü e1`

// spellings are the forms in which the canary may be written. Each comes from an encoder that
// shares no table with Redactor.
func spellings() map[string]string {
	basic := base64.StdEncoding.EncodeToString
	return map[string]string{
		"as it is": canary,
		"query":    url.QueryEscape(canary),
		"path":     url.PathEscape(canary),
		"lower-case escapes": regexp.MustCompile(`%..`).ReplaceAllStringFunc(
			url.QueryEscape(canary), strings.ToLower),
		"HTML":             html.EscapeString(canary),
		"JSON":             strings.Trim(fmt.Sprintf("%q", canary), `"`) + "x",
		"hexadecimal":      hex.EncodeToString([]byte(canary)),
		"base64":           basic([]byte(canary)),
		"URL-safe base64":  base64.RawURLEncoding.EncodeToString([]byte(canary)),
		"base64, one on":   basic([]byte("u" + canary + "tail")),
		"base64, two on":   basic([]byte("u:" + canary)),
		"base64, three on": basic([]byte("me:" + canary + "\n")),
		"with a line end":  canary + "\n",
	}
}

// leaks returns the middle of each spelling, which no file may contain. The ends of base64 depend
// on the text around it.
func leaks() (parts []string) {
	for _, spelling := range spellings() {
		parts = append(parts, spelling[8:len(spelling)-8])
	}
	return append(parts, canary)
}

func TestNoSecretIsInAnyFileOrError(t *testing.T) {
	for name, spelling := range spellings() {
		t.Run(name, func(t *testing.T) {
			planted := 0
			spoiled := copyOf(reflect.ValueOf(*example()), func(v reflect.Value) string {
				planted++
				return v.String() + " " + spelling + " \x1b]0;\x07\u202e"
			}).Interface().(Report)
			r := &spoiled
			r.Rack.Simulated = true
			if planted < 1000 {
				t.Fatalf("%d strings got the secret, expected all of the example", planted)
			}
			dir := filepath.Join(t.TempDir(), "report")
			err := Write(dir, r, canary+"\n")
			if err == nil || !strings.Contains(r.Why, spelling) {
				t.Fatalf("a report whose every word is changed adds up, or Write changed it: %q", r.Why)
			}
			texts := map[string]string{"the error": err.Error()}
			for _, file := range []string{jsonFile, junitFile, pageFile} {
				texts[file] = string(must(os.ReadFile(filepath.Join(dir, file)))(t))
				if !strings.Contains(texts[file], redacted) {
					t.Errorf("%s has no %s", file, redacted)
				}
			}
			for file, text := range texts {
				for _, leak := range append(leaks(), "\x1b", `\u001b`, "\u202e", `\u202e`, "\x07") {
					if at := strings.Index(text, leak); at >= 0 {
						t.Fatalf("%s contains %q: …%.120s…", file, leak, text[max(0, at-40):])
					}
				}
			}
		})
	}
}

func TestRedactorKeepsTextThatIsNoSecret(t *testing.T) {
	const text = "a disk of 2 GiB, Y2FuYXJ5, %2F and &amp;"
	for _, secrets := range [][]string{nil, {""}, {" "}, {" \n"}, {canary}} {
		if got := Redactor(secrets...).Replace(text); got != text {
			t.Errorf("Redactor(%q) changes %q to %q", secrets, text, got)
		}
	}
}

func TestControlCharactersOfARackAreReplaced(t *testing.T) {
	for text, want := range map[string]string{
		"two\nlines\tand a tab, é, 漢, 🙂": "two\nlines\tand a tab, é, 漢, 🙂",
		"\x1b[2Jgone\r\x07":              "\uFFFD[2Jgone\uFFFD\uFFFD",
		"\u009b2J":                       "\uFFFD2J",
		"a\u202eb\u2066c\u200fd\ufeff":   "a\uFFFDb\uFFFDc\uFFFDd\uFFFD",
		"\u2028\xff":                     "\uFFFD\uFFFD",
	} {
		var out strings.Builder
		if n, err := (PlainWriter{To: &out}).Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("%q: wrote %d bytes, %v", text, n, err)
		}
		if out.String() != want {
			t.Errorf("%q is written as %q, want %q", text, out.String(), want)
		}
	}
}

func TestTheHeadlineNamesTheGroupsOfAPartialRun(t *testing.T) {
	r := good()
	r.Run.Selected = []string{"data"}
	page, err := renderPage(r)
	if want := "<h1>Conforms (only data)</h1>"; err != nil || !strings.Contains(string(page), want) {
		t.Errorf("the page lacks %s (%v)", want, err)
	}
	for _, selected := range [][]string{nil, groups} {
		if r.Run.Selected = selected; r.Headline() != "Conforms" {
			t.Errorf("of %q: %s", selected, r.Headline())
		}
	}
}
