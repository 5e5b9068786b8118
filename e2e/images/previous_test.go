package images

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// git runs git in a directory, without the user's configuration, and returns its output.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	c := exec.CommandContext(t.Context(), "git", append([]string{"-c", "user.name=test",
		"-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"}, args...)...)
	c.Dir = dir
	c.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// twoReleases makes a repository of two commits, with "1" and "2" in the file release.
func twoReleases(t *testing.T) (dir string, commits [2]string) {
	t.Helper()
	dir = t.TempDir()
	git(t, dir, "init", "--quiet")
	for i, text := range []string{"1", "2"} {
		must(t, os.WriteFile(filepath.Join(dir, "release"), []byte(text), 0o600))
		git(t, dir, "add", ".")
		git(t, dir, "commit", "--quiet", "--message", text)
		commits[i] = git(t, dir, "rev-parse", "HEAD")
	}
	return dir, commits
}

func TestTheTreeOfThePreviousReleaseIsUnpackedByTagOrCommit(t *testing.T) { // D-57
	dir, commits := twoReleases(t)
	git(t, dir, "tag", "v1.0.0", commits[0])
	b := &Builder{Root: dir, Cache: t.TempDir(), Log: io.Discard}
	for _, test := range []struct{ release, name, want string }{
		{"v1.0.0", "v1.0.0", "1"}, {commits[0], "v1.0.0", "1"}, {commits[1], "", "2"},
	} {
		// The second time the tree is already there.
		for range 2 {
			p, err := FindPrevious(t.Context(), dir, test.release)
			must(t, err)
			if test.name != "" && p.Name != test.name {
				t.Errorf("%s is called %s, want %s", test.release, p.Name, test.name)
			}
			must(t, b.Unpack(t.Context(), &p))
			got, err := os.ReadFile(filepath.Join(p.Root, "release"))
			if err != nil || string(got) != test.want {
				t.Errorf("the tree of %s says %q, %v, want %s", test.release, got, err, test.want)
			}
		}
	}
	kept, err := os.ReadDir(filepath.Join(b.Cache, "previous"))
	if err != nil || len(kept) != 1 {
		t.Errorf("the cache keeps %v, %v, want one tree", kept, err)
	}
}

func TestAShallowCloneGetsAnErrorWithTheCommandThatFetches(t *testing.T) { // D-57
	dir, commits := twoReleases(t)
	shallow := filepath.Join(t.TempDir(), "shallow")
	git(t, dir, "clone", "--quiet", "--depth", "1", "file://"+dir, shallow)
	if _, err := FindPrevious(t.Context(), shallow, commits[1]); err != nil {
		t.Errorf("FindPrevious of the commit that the clone has: %v", err)
	}
	for _, release := range []string{commits[0], "v9.9.9", ""} {
		_, err := FindPrevious(t.Context(), shallow, release)
		if err == nil {
			t.Errorf("FindPrevious(%q) found what the clone has not", release)
			continue
		}
		for _, want := range []string{release, "--unshallow", "fetch-depth: 0", "-previous"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("FindPrevious(%q) = %v, want %q in it", release, err, want)
			}
		}
	}
}
