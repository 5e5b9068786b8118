package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTextOfARackIsPlain(t *testing.T) {
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

func TestNoFileOfAReportContainsControlCharacters(t *testing.T) {
	r, dir := example(), filepath.Join(t.TempDir(), "report")
	r.Results[0].Name, r.Why = "\x1b]0;title\x07", "\u202esmrofnoc"
	if err := Write(dir, r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{jsonFile, junitFile, pageFile} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, mark := range []string{"\x1b", `\u001b`, "\u202e", `\u202e`, "\x07"} {
			if strings.Contains(string(text), mark) {
				t.Errorf("%s has %q", name, mark)
			}
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
