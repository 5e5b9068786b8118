// Package conformance is the program oxide-conformance. It tests whether a rack does what the
// driver needs, and whether data on the rack's disks survives.
//
// The program runs inside an instance of the rack, as one file that contains the driver. [Main]
// runs the command line. Each verb has a file of its name: preflight examines the rack and the
// machine before a run, run runs, clean removes the remains of a dead run, diff compares the
// reports of two runs, and demo shows the life of a volume on a simulated rack.
//
// A run has parts, in this order: the rules of the API (package rules); csi-sanity over ext4,
// xfs, btrfs and raw block (package csisuite); and data that is written, moved and read back
// (package data). It ends in a [report.Report] with a verdict, which is also the exit status.
//
// Nothing that did not run counts as passed. A part or a spec is blocked if the rack keeps
// everybody from running it, and not applicable if the driver does not offer the feature. A spec
// that made none of the calls that it is about has failed, even if it reports success
// (witness.go).
//
// Every object that a run creates carries the run's mark. A disk that is created first and
// deleted last records who runs it, where, and in which instances. So clean finds everything that
// belongs to a run, and nothing else.
package conformance
