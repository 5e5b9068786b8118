package driver

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

// FuzzStartingToken holds that a token which is none of ours is ABORTED, and that from one that is
// the pages show every object behind it once, in order, however long they are.
func FuzzStartingToken(f *testing.F) {
	var ids []string
	for i := range 40 {
		ids = append(ids, fmt.Sprintf("%08x-0000-4000-8000-000000000000", i*0x06000000))
	}
	c := &rackClient{Project: testProject}
	f.Fuzz(func(t *testing.T, token string, most int32) {
		_, err := c.newPager(token, most)
		after, _, paged := strings.Cut(token, ".")
		switch ours := token == "" || csitest.UUID.MatchString(after) && (!paged || err == nil); {
		case most < 0:
			csitest.Presentable(t, err, codes.InvalidArgument)
			return
		case !ours:
			csitest.Presentable(t, err, codes.Aborted)
			return
		case err != nil:
			t.Fatalf("the token %q is refused: %v", token, err)
		}
		var shown, want []string
		for _, id := range ids {
			if id > after {
				want = append(want, id)
			}
		}
		for at, turn := token, 0; ; turn++ {
			page, err := c.newPager(at, most)
			if err != nil || turn > len(ids) {
				t.Fatalf("page %d, with the token %q: %v", turn, at, err)
			}
			before := len(shown)
			for _, id := range ids {
				if page.take(id, &csi.Volume{}) {
					shown = append(shown, id)
				}
				if page.full() {
					break
				}
			}
			if most > 0 && len(shown)-before > int(most) {
				t.Fatalf("a page of %d, where %d were asked for", len(shown)-before, most)
			}
			if at = page.next; at == "" {
				break
			}
		}
		if !slices.Equal(shown, want) {
			t.Fatalf("behind %q in pages of %d: %q, want %q", token, most, shown, want)
		}
	})
}

// FuzzConfig holds that no configuration, however wrong, shows a value in its error, or says more
// than one line.
func FuzzConfig(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		env := csitest.Pairs(strings.ReplaceAll(text, "%", canary))
		_, err := ParseConfig(nil, func(name string) string { return env[name] }, io.Discard)
		if err != nil && (strings.Contains(err.Error(), canary) ||
			strings.ContainsAny(err.Error(), "\n\r\x00")) {
			t.Fatalf("%q: the error is %q", env, err)
		}
	})
}
