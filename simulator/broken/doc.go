// Package broken lets a simulated rack break its rules: each [Mutation] of its table breaks one, by
// changing requests on their way in, answers on their way out, or the bytes of disks. With them the
// conformance suite proves that it would notice a rack that does the same.
//
// A mutation is in force for the whole rack, from its start (oxide-simulator serve --mutation NAME)
// or from the admin listener's PUT /mutations/NAME on. One is in force at a time. What goes wrong
// once, or at a chosen request, is an adminapi.Fault instead.
package broken
