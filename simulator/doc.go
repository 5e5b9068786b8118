// Package simulator is an Oxide rack on one machine: the HTTP API, the bytes of its disks, and what
// each of its guests sees.
//
// A request of the API comes in through [Server.ServeHTTP] and meets, in this order: the version
// it asks for, its route, its path, query and body, the faults that strike before everything, its
// token, the faults that take the place of the effect, the operation itself, and the faults that
// strike after it. The operation decides in a transaction over the records, and then works on the
// data plane under a lock of the objects it touches; what takes long, and everything a caller may
// see half done, has a state in the records, as on the rack. One place turns results and errors
// into answers.
//
// The records lie in a bbolt file: what was acknowledged is on disk. A simulator that starts takes
// back what another left half done, and gives running instances their devices.
//
// Every rule that imitates the rack cites an assumption (A01, A02, …) of ASSUMPTIONS.md, which says
// where it comes from; the test of a rule bears its number. A route that the rack has and this
// package lacks answers 501 and logs an error, so nothing is ever answered by accident. What goes
// wrong on purpose is an adminapi.Fault.
package simulator
