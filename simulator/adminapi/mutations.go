package adminapi

import (
	"context"
	"net/http"
)

// Mutation is one way in which the rack breaks one of its rules on request.
type Mutation struct {
	Name string `json:"name"`
	// Rule is the ID of the rule or of the promise about data that the mutation breaks.
	Rule string `json:"rule"`
	Says string `json:"says"`
	// DriverSays is the reason (docs/reasons.md) with which the driver must refuse to continue.
	DriverSays string `json:"driver_says,omitempty"`
	// Active reports whether the mutation is active.
	Active bool `json:"active"`
}

// Mutations lists all mutations.
func (c Client) Mutations(ctx context.Context) ([]Mutation, error) {
	var mutations []Mutation
	err := c.call(ctx, http.MethodGet, "/mutations", nil, &mutations)
	return mutations, err
}

// Mutate activates a mutation, which replaces the active one.
func (c Client) Mutate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPut, "/mutations/"+name, nil, nil)
}

// Mend ends the active mutation.
func (c Client) Mend(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/mutations", nil, nil)
}
