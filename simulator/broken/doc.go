// Package broken makes a simulated rack break its rules. Each [Mutation] of its table breaks one
// rule: it changes requests before the rack reads them, answers before the caller gets them, or
// the bytes of disks. With the mutations the conformance suite proves that it would notice a rack
// that does the same.
//
// A mutation applies to the whole rack. It begins with the rack (oxide-simulator serve --mutation
// NAME) or with PUT /mutations/NAME on the admin listener. Only one mutation is active at a time.
// For an error that happens once, or at a chosen request, use an adminapi.Fault instead.
package broken
