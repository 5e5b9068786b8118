package adminapi

import (
	"context"
	"net/http"
)

// Mutation is one way in which the rack can be told to break one of its rules.
type Mutation struct {
	Name string `json:"name"`
	// Rule is the ID of the rule, or of the promise about data, that it breaks.
	Rule string `json:"rule"`
	Says string `json:"says"`
	// DriverSays is the reason (docs/reasons.md) with which the driver must refuse to go on.
	DriverSays string `json:"driver_says,omitempty"`
	// Active is whether it is in force.
	Active bool `json:"active"`
}

// Mutations lists every way in which the rack can be told to break its rules.
func (c Client) Mutations(ctx context.Context) ([]Mutation, error) {
	var mutations []Mutation
	err := c.call(ctx, http.MethodGet, "/mutations", nil, &mutations)
	return mutations, err
}

// Mutate lets the rack break a rule from now on, in the place of any other.
func (c Client) Mutate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPut, "/mutations/"+name, nil, nil)
}

// Mend puts the rack in order.
func (c Client) Mend(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/mutations", nil, nil)
}
