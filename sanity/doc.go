// Package sanity is the conformance suite of the driver. It runs csi-sanity and specs of its own
// against the driver and a rack on real block devices. Driver and rack are processes, reached over
// sockets and HTTP. The package imports no code of the driver and, of the simulator, only the types
// of the admin listener.
//
// # What runs
//
// TestTheDriverPassesCSISanity runs csi-sanity in every combination that the driver supports (ext4,
// xfs, btrfs and raw block; one process, or controller and node as two), and this package's specs,
// on simulated racks. It runs several parts at the same time, each as a process in a mount
// namespace of its own. Package conformance runs csi-sanity against a real rack.
//
//	make sanity                                          all of it
//	go test -race ./sanity -run TestTheDriverPassesCSISanity \
//	    -ginkgo.label-filter='xfs && split'              one combination
//	go test -race ./sanity -run TestTheDriverPassesCSISanity \
//	    -ginkgo.focus='UP-5'                             the specs of one requirement
//
// # Writing a spec
//
// A spec is in a test file of this package. describeController and describeNodes register a
// container whose specs share a fixture: a rack, a controller and, for describeNodes, the node
// service in the instances a and b. A spec's name is a sentence, with its requirements at the end.
//
// At the end of the spec, the suite stops and removes everything that a fixture started or created
// for it; what BeforeAll created stays until the end of the container. The processes must end with
// exit code 0 (a data race makes it 66). A container fails if it leaves a process, disk, loop
// device or mount behind (mustBalance). No spec sleeps.
//
// # When a spec fails
//
// The report of a failed spec contains the log lines of every process during the spec. The run's
// directory, with the racks' records and the logs, is kept and named at the end.
//
// In a full run every skipped spec must be on a list in package csisuite, with the missing
// capability that explains the skip, and every entry of the list must match a skip.
package sanity
