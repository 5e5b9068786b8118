package rules

import (
	"context"
	"errors"
	"net/http"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// APIVersion is the version of the API that the checks, and the driver, ask for.
const APIVersion = apiVersion

// Brief describes an error of Oxide's client in a line: its own text is a page.
func Brief(err error) string { return brief(err) }

// IsBusy reports whether the rack has refused because it is busy (429, 502, 503, 504).
func IsBusy(err error) bool { return isBusy(err) }

// IsGone reports whether the rack does not have the object.
func IsGone(err error) bool { return err != nil && gone(err) == nil }

// RemoveInstance stops and deletes an instance that a run has made.
func (r *Rack) RemoveInstance(ctx context.Context, id string) error {
	return (&Check{Rack: r, ctx: ctx}).removeInstance(ctx, id)
}

// Await waits until an instance is in a state.
func (r *Rack) Await(ctx context.Context, instance string, want oxide.InstanceState) error {
	return r.await(ctx, instance, want)
}

// StoppedInstance makes, once, the small instance without disks that is never started.
func (r *Rack) StoppedInstance(ctx context.Context) (instance *oxide.Instance, err error) {
	c := &Check{Rack: r, ctx: ctx}
	defer func() {
		if len(c.problems) > 0 {
			err = errors.New(c.problems[0])
		}
	}()
	defer func() {
		if ended := recover(); ended != nil && ended != (over{}) {
			panic(ended)
		}
	}()
	return c.StoppedInstance(), nil
}

// HTTP is the client by which the rack is asked.
func (r *Rack) HTTP() *http.Client { return r.http }
