// Package simulator serves a simulated Oxide rack: the API over HTTP, and an admin listener to
// watch and disturb it.
//
// [Open] opens a rack and returns its [Server]. A request passes, in this order: the version that
// it asks for, its route, its path, query and body, the faults of the phase before, its token, the
// faults that replace the effect, the operation itself, and the faults that act after it. One place
// turns results and errors into responses, and one writes the request log.
//
// The operations are in package engine, which decides by the rack's rules. The records are in
// package store and what was acknowledged is on disk; bytes and guest views are in package
// dataplane. The wire types of the admin listener, faults among them, are in package adminapi.
//
// Every rule that imitates the rack cites an assumption (A01, A02, …) of ASSUMPTIONS.md, which
// gives its source; the test of a rule has its number in its name. An operation that the rack has
// and this package lacks is answered with 501 and logged as an error, so no response is wrong by
// accident. What goes wrong on purpose is an adminapi.Fault.
//
// A rack needs Linux and root, for its loop devices. On other systems the package builds, and Open
// fails.
package simulator
