package images

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestEveryInputChangesTheHash(t *testing.T) {
	base := hash("ab", "c")
	for _, other := range [][]string{{"a", "bc"}, {"ab", "c", ""}, {"ab"}, {"ab", "d"}} {
		if hash(other...) == base {
			t.Errorf("hash(%q) is that of [ab c]", other)
		}
	}
	if again := hash("ab", "c"); again != base || len(base) != 12 {
		t.Errorf("hash is %q and then %q, want twelve characters that stay", base, again)
	}
	tree := fstest.MapFS{"dir/a": {Data: []byte("1")}, "b": {Data: []byte("2")}}
	first, err := hashTree(tree)
	must(t, err)
	for name, other := range map[string]fstest.MapFS{
		"a content": {"dir/a": {Data: []byte("1")}, "b": {Data: []byte("3")}},
		"a path":    {"a": {Data: []byte("1")}, "b": {Data: []byte("2")}},
		"a file":    {"dir/a": {Data: []byte("1")}},
	} {
		if got, err := hashTree(other); err != nil || got == first {
			t.Errorf("a tree with another %s has the same hash: %s, %v", name, got, err)
		}
	}
}

func TestTheErrorOfAFailedPullNamesTheOfflineSuite(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "docker"), []byte("#!/bin/sh\nexit 1\n"), 0o700))
	t.Setenv("PATH", dir)
	_, err := (&Builder{Engine: &engine.Engine{}}).Node(t.Context(), "v1.35.8")
	if err == nil || !strings.Contains(err.Error(), "make e2e-offline") {
		t.Errorf("the error is %v", err)
	}
}

func TestAptSourcesOfOtherVendorsAreOmitted(t *testing.T) {
	const debian = "/d.sources:1 bookworm main\n/d.sources:1 bookworm-updates main\n" +
		"/d.sources:2 bookworm-security main\n/d.sources:2 bookworm-security contrib\n"
	for name, other := range map[string]string{
		"alone":                                  "",
		"another vendor":                         "/v.list:1 cloud-sdk-bookworm main\n",
		"another vendor, with another component": "/v.list:1 bookworm stable\n",
		"another release":                        "/v.list:1 trixie main\n",
		"another vendor, for several releases":   "/v.list:1 bookworm main\n/v.list:2 nodistro main\n",
	} {
		if got := ofRelease(other+debian, "bookworm"); !slices.Equal(got, []string{"/d.sources"}) {
			t.Errorf("%s: %q, want Debian's file", name, got)
		}
	}
}

func TestModulesRequireTheVersionsInTheirImageTags(t *testing.T) {
	for module, want := range map[string][]string{
		"kubernetes": {"k8s.io/kubernetes " + Kubernetes},
		"etcd":       {"go.etcd.io/etcd/server/v3 v" + strings.TrimSuffix(etcd, "-0")},
		"sidecars": {
			"external-provisioner/v6 " + versionOf(t, "csi-provisioner"),
			"external-attacher/v4 " + versionOf(t, "csi-attacher"),
			"external-snapshotter/v8 " + versionOf(t, "csi-snapshotter"),
			"external-snapshotter/v8 " + versionOf(t, "snapshot-controller"),
		},
	} {
		text, err := os.ReadFile(filepath.Join(module, "go.mod"))
		must(t, err)
		for _, line := range want {
			if !strings.Contains(string(text), line) {
				t.Errorf("%s/go.mod does not require %s", module, line)
			}
		}
	}
}

func versionOf(t *testing.T, name string) string {
	t.Helper()
	for _, s := range singles() {
		if rest, ok := strings.CutPrefix(s.image, storage+name+":"); ok {
			return rest
		}
	}
	t.Fatalf("no image %s is built", name)
	return ""
}

var imageName = regexp.MustCompile(`(?m)^\s*(?:- )?image:\s*"?([^\s"]+)`)

func TestOfflineBuildsMakeEveryImageOfTheManifests(t *testing.T) { // D-7, B-36
	built := map[string]bool{}
	for _, s := range singles() {
		built[s.image] = true
	}
	for _, p := range product {
		built[p.image] = true
	}
	found := 0
	err := filepath.WalkDir("../../deploy/kustomize", func(path string, entry os.DirEntry,
		err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range imageName.FindAllStringSubmatch(string(text), -1) {
			found++
			if !built[match[1]] {
				t.Errorf("%s runs %s, which no offline build makes", path, match[1])
			}
		}
		return err
	})
	must(t, err)
	if found < 8 {
		t.Errorf("found %d images in the manifests, want those of controller, node and simulator",
			found)
	}
}

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

func TestTheErrorForAShallowCloneSaysHowToFetchItsHistory(t *testing.T) { // D-57
	dir, shallow := t.TempDir(), filepath.Join(t.TempDir(), "shallow")
	git(t, dir, "init", "--quiet")
	git(t, dir, "commit", "--quiet", "--allow-empty", "--message", "1")
	first := git(t, dir, "rev-parse", "HEAD")
	git(t, dir, "commit", "--quiet", "--allow-empty", "--message", "2")
	git(t, dir, "clone", "--quiet", "--depth", "1", "file://"+dir, shallow)
	if _, err := FindPrevious(t.Context(), shallow, "HEAD"); err != nil {
		t.Errorf("FindPrevious of the commit that the clone has: %v", err)
	}
	for _, release := range []string{first, "v9.9.9"} {
		_, err := FindPrevious(t.Context(), shallow, release)
		for _, want := range []string{release, "--unshallow", "fetch-depth: 0", "-previous"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("FindPrevious(%q) = %v, want %q in it", release, err, want)
			}
		}
	}
}
