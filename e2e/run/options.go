package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
)

// options contains the user's settings.
type options struct {
	offline, down            bool
	focus, label, kubernetes string
	timeout                  time.Duration

	// previous is the release that the suite upgrades from: a tag or a commit.
	previous string
	// keep leaves cluster and engine running, and reuse uses a cluster that was kept.
	keep, reuse bool
	// cache is the directory for what is built.
	cache string
}

// published is the default Kubernetes version of a run with published images. Its minor version is
// that of the offline run, and its patch version is one for which kind's release has an image.
const published = "v1.35.8"

// previousRelease is the tag of the last release. There is none yet, so it is a commit from before
// the flight recorder, the doctor and most of the chart's values.
const previousRelease = "e6877c0dc0dc97bb955365d67faaa05b967e4f0a"

func parse(args []string, output io.Writer) (options, error) {
	o := options{keep: os.Getenv("KEEP") == "1", reuse: os.Getenv("E2E_REUSE") == "1"}
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.Usage = func() {
		fmt.Fprint(output, usage)
		flags.PrintDefaults()
	}
	flags.BoolVar(&o.offline, "offline", false,
		"build every image on this machine, from Go modules and Debian's packages")
	flags.StringVar(&o.focus, "focus", "", "run the specs whose text matches this expression")
	flags.StringVar(&o.label, "label", "",
		"run the specs whose labels match this expression (default !long, and every spec with -focus)")
	flags.BoolVar(&o.down, "down", false, "remove what a run with KEEP=1 has left")
	flags.StringVar(&o.kubernetes, "kubernetes", "",
		"version of the nodes (default "+published+", and "+images.Kubernetes+" with -offline)")
	flags.StringVar(&o.previous, "previous", previousRelease,
		"tag or commit of the release that the suite upgrades from, and goes back to")
	flags.DurationVar(&o.timeout, "timeout", time.Hour, "how long the suite may take")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.label == "" && o.focus == "" {
		o.label = "!long"
	}
	if o.kubernetes == "" {
		o.kubernetes = published
		if o.offline {
			o.kubernetes = images.Kubernetes
		}
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("expected flags alone, and found %q: a spec is chosen with -focus",
			flags.Arg(0))
	case o.offline && o.kubernetes != images.Kubernetes:
		return o, fmt.Errorf("offline, the nodes run %s, and -kubernetes asks for %s: leave out one "+
			"of -offline and -kubernetes", images.Kubernetes, o.kubernetes)
	case o.timeout < 2*suiteEnd:
		return o, fmt.Errorf("expected a -timeout of at least %s, since the suite cleans up in the "+
			"last %s, and found %s", 2*suiteEnd, suiteEnd, o.timeout)
	case !strings.HasPrefix(o.kubernetes, "v"):
		return o, fmt.Errorf("expected a version such as %s, and found -kubernetes %s", published,
			o.kubernetes)
	}
	cache, err := os.UserCacheDir() // XDG_CACHE_HOME, or ~/.cache
	o.cache = filepath.Join(cache, "oxide-csi-e2e")
	return o, err
}

// mountedNoDev is the flag of a mount that does not allow device nodes.
const mountedNoDev = 0x4

// workDir creates the directory for the rack. The guests' devices are created in it, so its file
// system has to allow device nodes; that of /tmp often does not.
func workDir(candidates []string, flagsOf func(dir string) (int64, error)) (string, error) {
	for _, dir := range candidates {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("make the directory for the rack: %w", err)
		}
		flags, err := flagsOf(dir)
		if err != nil {
			return "", err
		}
		if flags&mountedNoDev == 0 {
			return os.MkdirTemp(dir, "oxide-csi-e2e-")
		}
	}
	return "", fmt.Errorf("expected a directory on a filesystem that is mounted without nodev, and "+
		"found none among %s: set TMPDIR to one", strings.Join(candidates, ", "))
}
