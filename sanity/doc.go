// Package sanity is the conformance suite: csi-sanity and our own specs against the driver and a
// rack, which run as processes and meet over sockets and HTTP, on real block devices. It imports
// neither of them.
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
// A spec is a test file of this package. describeController and describeNodes register a container
// whose specs share a fixture: a rack, a controller and, with nodes, the node service in the
// instances a and b. A spec's name is a sentence with the requirement that it keeps.
//
//	var _ = describeNodes("a volume that moves", func(f *nodeFixture) {
//		It("CU-1 keeps its data", func(ctx SpecContext) {
//			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
//			Expect(p.write(0)).To(Succeed())
//			f.detached(ctx, p)
//			moved := f.inUse(ctx, p.Volume, f.b, harness.Mounted("ext4"))
//			Expect(moved.verify(0)).To(Succeed())
//		})
//	})
//
// What a fixture starts or makes is stopped and removed at the end of the spec, or of the container
// when BeforeAll asked for it. The processes must end with exit code 0 (a data race makes it 66)
// and leave no process, loop device or mount; a ledger at the end proves that nothing leaks.
// Package harness does the same without Ginkgo. No spec sleeps.
//
// # When a spec fails
//
// Its report holds what every process logged during it, and the run's directory with the racks'
// records and the logs is kept and named at the end.
//
// A spec that is skipped must be on a list in skips.go with the capability that explains it; an
// entry of the list that explains nothing fails a full run, too.
package sanity
