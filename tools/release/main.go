// Release makes all files of a version for its users, in one folder:
//
//	go run -C tools ./release -version v1.2.3 -out ../dist
//	go run -C tools ./release -version v1.2.3 -out ../dist -arch amd64 -images=false
//
// The bytes depend only on the commit and the version of Go, not on the time or the machine.
// docs/releasing.md lists the files.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	r := release{Log: os.Stderr}
	flag.StringVar(&r.Version, "version", "", "the version, such as v1.2.3")
	flag.StringVar(&r.Root, "root", "..", "the project's `directory`")
	flag.StringVar(&r.Out, "out", "../dist", "the `folder` to make; a release in it is replaced")
	flag.StringVar(&r.Base, "base", "", "a `tar` of Debian's root file system, as the base of images "+
		"where no registry is reached; for one architecture")
	flag.BoolVar(&r.Images, "images", true, "build the images, too")
	flag.BoolVar(&r.Dirty, "dirty", false, "build the tree with uncommitted changes, for a trial")
	arch := flag.String("arch", "amd64 arm64", "the architectures")
	flag.Parse()
	r.Arch = strings.Fields(*arch)
	err := r.run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// release is a version that is being made.
type release struct {
	Version   string // such as "v1.2.3"
	Root, Out string
	Arch      []string
	Base      string
	Images    bool
	Dirty     bool // allow a tree that differs from its commit
	Log       io.Writer

	revision string    // the commit's hash
	date     time.Time // the commit's date
	stage    string    // a directory for temporary files
	made     string    // the directory that becomes Out
	targets  []target
	pushed   strings.Builder // the lines of DIGESTS
}

// run makes the folder. It replaces an older folder when the new one is complete.
func (r *release) run(ctx context.Context) (err error) {
	defer catch(&err)
	need(r.prepare(ctx))
	r.stage = got(os.MkdirTemp("", "oxide-release-"))
	defer func() { err = errors.Join(err, os.RemoveAll(r.stage)) }()
	r.made = filepath.Join(r.stage, "made")
	need(os.Mkdir(r.made, 0o755))
	r.notes()
	r.binaries(ctx)
	r.chart(ctx)
	r.manifests()
	if r.Images {
		r.images(ctx)
	}
	r.checksums()
	need(os.RemoveAll(r.Out))
	// Copy instead of renaming: the folder may be on another filesystem.
	need(os.CopyFS(r.Out, os.DirFS(r.made)))
	got(fmt.Fprintf(r.Log, "release: %s is in %s\n", r.Version, r.Out))
	return nil
}

// failed is the panic of a step that has failed. It ends in catch.
type failed struct{ error }

// need panics if a step has failed. got returns the result of a step, or panics.
func need(err error) {
	if err != nil {
		panic(failed{err})
	}
}

func got[T any](result T, err error) T {
	need(err)
	return result
}

// catch makes a function return the error of the step that has failed.
func catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case failed:
		*err = errors.Join(*err, r.error)
	default:
		panic(r)
	}
}

// prepare checks the request and reads the commit.
func (r *release) prepare(ctx context.Context) (err error) {
	defer catch(&err)
	r.Root, r.Out = got(filepath.Abs(r.Root)), got(filepath.Abs(r.Out))
	switch {
	case !semver.IsValid(r.Version) || semver.Canonical(r.Version) != r.Version:
		return fmt.Errorf("-version is %q: expected three numbers, such as v1.2.3 or v1.2.3-rc.1",
			r.Version)
	case len(r.Arch) == 0:
		return errors.New("-arch is empty: expected amd64, arm64 or both")
	case r.Base != "" && len(r.Arch) != 1:
		return fmt.Errorf("-base is of one architecture, and -arch has %d: name one", len(r.Arch))
	}
	for _, arch := range r.Arch {
		if arch != "amd64" && arch != "arm64" {
			return fmt.Errorf("-arch has %q: expected amd64, arm64 or both", arch)
		}
	}
	old, err := os.ReadDir(r.Out)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if len(old) > 0 && !slices.ContainsFunc(old,
		func(e os.DirEntry) bool { return e.Name() == sums }) {
		return fmt.Errorf("%s has files, but no %s, so it is not a release to replace: "+
			"name another folder, or empty it", r.Out, sums)
	}
	need(r.commit(ctx))
	r.targets = got(targetsOf(filepath.Join(r.Root, "Dockerfile")))
	return nil
}

// commit reads the commit and its date, which becomes the date of every file.
func (r *release) commit(ctx context.Context) error {
	revision, err := r.output(ctx, "git", "describe", "--always", "--dirty", "--abbrev=40",
		"--match=")
	if err != nil {
		return fmt.Errorf("a release needs a commit: %w", err)
	}
	r.revision = strings.TrimSpace(revision)
	changes := got(r.output(ctx, "git", "status", "--porcelain"))
	if list := strings.Split(strings.TrimSpace(changes), "\n"); changes != "" && !r.Dirty {
		return fmt.Errorf("a release needs a commit, and the tree differs from it in %d files, "+
			"such as %q: commit or remove them, or make a clone", len(list), list[0])
	}
	seconds := os.Getenv("SOURCE_DATE_EPOCH")
	if seconds == "" {
		seconds = got(r.output(ctx, "git", "log", "-1", "--format=%ct"))
	}
	date, err := strconv.ParseInt(strings.TrimSpace(seconds), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH is %q: expected seconds since 1970", seconds)
	}
	r.date = time.Unix(date, 0).UTC()
	return nil
}

// output runs a program in the project's directory and returns its output.
func (r *release) output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = r.Root
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, complaints.String())
	}
	return out.String(), nil
}

// write writes a file of the release.
func (r *release) write(name string, content []byte) {
	need(os.WriteFile(filepath.Join(r.made, name), content, 0o644))
}

// project is the URL of the sources.
const project = "https://github.com/oxidecomputer/oxide-csi-plugin"

func (r *release) notes() {
	changelog := got(os.ReadFile(filepath.Join(r.Root, "CHANGELOG.md")))
	r.write("RELEASE_NOTES.md", []byte(got(section(string(changelog), r.Version))))
}

// link matches a relative link to a file of the project. It would not work in the notes of a
// release.
var link = regexp.MustCompile(`\]\(([^):#]+[^):]*)\)`)

// section returns a version's section of the changelog. For a version before a release, such as
// v1.2.3-rc.1, it returns the section of unreleased changes.
func section(changelog, version string) (string, error) {
	wanted := []string{version}
	if semver.Prerelease(version) != "" {
		wanted = append(wanted, "Unreleased")
	}
	for _, heading := range wanted {
		for part := range strings.SplitSeq("\n"+changelog, "\n## ") {
			title, text, _ := strings.Cut(part, "\n")
			name, _, _ := strings.Cut(title, " ") // a date may follow
			text = strings.TrimSpace(text)
			if name != heading || text == "" {
				continue
			}
			return link.ReplaceAllString(text, "]("+project+"/blob/"+version+"/$1)") + "\n", nil
		}
	}
	return "", fmt.Errorf("CHANGELOG.md has nothing for %s: expected a section headed \"## %s\" "+
		"with text; rename the section Unreleased", version, version)
}
