// Package simulator serves a simulated Oxide rack: the API over HTTP, and an admin listener
// through which tests watch and disturb it.
//
// [Open] opens a rack and returns its [Server]. The server handles a request in this order: the
// version in its header, its route, its path, query and body, the faults of the phase before, its
// token, the faults that replace the effect, the operation itself, and the faults that act after
// it. One function turns results and errors into responses, and one writes the request log.
//
// Package engine has the operations and decides by the rack's rules. Package store has the
// records; everything that was acknowledged is on disk. Package dataplane has the bytes and the
// guest views. Package adminapi has the wire types of the admin listener, including faults, and
// package console its web page, which also shows what package flightlog reads of drivers' flight
// records.
//
// Every rule of the rack in this code cites an assumption (A01, A02, …) of package rules, whose
// ASSUMPTIONS.md names its source. The test of a rule has the rule's number in its name. An
// operation that a rack has and this package lacks is answered with 501 and logged as an error, so
// no response is wrong by accident. An adminapi.Fault makes a response wrong on purpose.
//
// The instances see their disks as loop devices, which need Linux and root. A rack with
// Config.Devices [NoDevices] does without, on any system. The tests of other programs get one from
// package simulatortest.
package simulator
