// Package sanity is the conformance suite: it lets the driver and a rack meet, as processes, over
// sockets and HTTP, on real block devices. It knows neither from inside.
//
// # What runs
//
// TestSanity runs csi-sanity in every combination that the driver promises (ext4, xfs, btrfs and
// raw block; one process, or controller and node as two), and our own specs beside it, against
// simulated racks. It does so in parts, side by side, each a process of its own in a mount
// namespace of its own, so that runs do not see each other. [Conformance] runs the part that needs
// no simulator against the rack that OXIDE_HOST names; cmd/oxide-conformance is its program.
//
//	make sanity                                          all of it
//	go test -race ./sanity -run TestSanity \
//	    -ginkgo.label-filter='xfs && split'              one combination
//	go test -race ./sanity -run TestSanity \
//	    -ginkgo.focus='CP-10'                            one requirement
//
// # Writing a spec
//
// A spec file registers its container with [Simulated] instead of Describe, so that a program that
// imports this package does not get all specs. Inside, it is Ginkgo as usual; a spec's name is a
// sentence with the requirement that it keeps.
//
//	var _ = Simulated("a volume that moves", func() {
//		It("CU-1 keeps its data", func(ctx SpecContext) {
//			rack := NewRack(ctx, RackOptions{})                          // instances a and b
//			all := rack.Plugin(ctx, PluginOptions{Instance: "a"})        // mode all, in a
//			other := rack.Plugin(ctx, PluginOptions{Mode: ModeNode, Instance: "b"})
//			rack.Balanced(ctx, all, other)                               // nothing may leak
//			…  all.Controller().CreateVolume(ctx, …), other.Node().NodeStageVolume(ctx, …)
//		})
//	})
//
// What [NewRack] and [Rack.Plugin] start is stopped at the end of the spec, or of the container
// when BeforeAll of an Ordered one asked for it; they must end with exit code 0 (a data race makes
// it 66) and leave no process, loop device or mount. To go without Ginkgo, as benchmarks and the
// demo do, use [NewRun], [Run.StartRack], [Rack.StartPlugin] and Stop, which return errors.
//
// A rack is looked at and disturbed through [Rack.Admin] (request log, faults, switches), through
// [Rack.Client] (Oxide's own client), and with [Rack.Kill] and [Rack.Start]; a driver with
// [Plugin.Kill] and [Plugin.Start], which comes back at the same socket. [Rack.Balanced] compares
// the [Ledger] before and after. [Await] waits for a condition; no spec sleeps.
//
// # When a spec fails
//
// Its report holds what every process logged during it, and the run's directory with the racks'
// records and the logs is kept and named at the end.
//
// A spec that is skipped must be on a list in skips.go with the capability that explains it; an
// entry of the list that explains nothing fails a full run, too.
package sanity
