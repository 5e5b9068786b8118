// Package conformance is the program oxide-conformance: it tells an operator whether a rack does
// what the driver needs, and whether the driver keeps his bytes on it.
//
// It runs inside an instance of the rack, as one file that has the driver in it. [Main] takes the
// command line. Its verbs are in files of their names: preflight asks what a run would meet, run
// runs, clean removes what a dead run has left, diff compares the reports of two runs, and demo
// shows the life of a volume on a simulated rack.
//
// A run has parts, in this order: the rules of the API (package rules); csi-sanity over ext4, xfs,
// btrfs and raw block (package csisuite); and data that is written, moved and read back (package
// data). It ends in a [report.Report] with a verdict, which is also the exit status.
//
// Nothing counts as passed that did not run. A part or a spec that the rack does not let anybody
// run is blocked, what the driver does not offer is not applicable, and a spec that made none of
// the calls that it is about has failed, whatever it says (witness.go).
//
// Everything that a run makes carries its mark, and a disk that is made first and deleted last says
// who runs it, where, and in which instances; so clean finds it all, and nothing else.
package conformance
