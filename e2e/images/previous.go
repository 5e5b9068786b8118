package images

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Previous is the previous release, from which the suite upgrades. The zero value means that there
// is none.
type Previous struct {
	// Name is its name according to git describe, and Root the directory of its tree.
	Name, Root string
	commit     string
}

// FindPrevious finds a commit or a tag in the clone at root. It does not create its tree.
func FindPrevious(ctx context.Context, root, release string) (Previous, error) {
	commit, err := command(ctx, root, nil, "git", "rev-parse", "--verify", release+"^{commit}")
	if err != nil {
		return Previous{}, fmt.Errorf("expected the release before, %s, among the commits of %s, "+
			"since the suite upgrades from it, and found: %w; fetch the whole history with git fetch "+
			"--unshallow --tags (in a workflow, fetch-depth: 0 of actions/checkout), or name another "+
			"commit with -previous", release, root, err)
	}
	name, err := command(ctx, root, nil, "git", "describe", "--tags", "--always", commit)
	return Previous{Name: name, commit: commit}, err
}

// Unpack puts the tree of a release into the cache, in the place of that of another one.
func (b *Builder) Unpack(ctx context.Context, p *Previous) (err error) {
	if *p == (Previous{}) {
		return nil
	}
	p.Root, err = b.keep("previous", "release", p.commit[:12], "", func(partial string) error {
		if err := os.MkdirAll(partial, 0o755); err != nil {
			return fmt.Errorf("make a directory for the tree of a release: %w", err)
		}
		archive := partial + ".tar"
		_, err := command(ctx, b.Root, nil, "git", "archive", "--output", archive, p.commit)
		if err == nil {
			_, err = command(ctx, partial, nil, "tar", "--extract", "--file", archive)
		}
		return errors.Join(err, os.Remove(archive))
	})
	return err
}
