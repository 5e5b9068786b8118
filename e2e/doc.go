// Package e2e proves on a Kubernetes cluster what users install: a kind cluster of one control
// plane and two workers, the real kubelet, the real sidecars, the driver's own images, and the
// manifests of package deploy, applied as a user applies them. The rack is simulated; it runs as a
// pod of the control plane, and each worker is one of its instances, with that instance's view of
// /sys and /dev mounted in.
//
//	make e2e                                images from where they are published
//	make e2e-offline                        the same suite, every image built on this machine
//	go run ./e2e/run -offline -focus CP-10  one requirement
//	KEEP=1 make e2e-offline                 leaves the cluster and says how to look at it
//
// The package knows neither driver nor simulator from inside. It looks at claims, pods and events
// through the Kubernetes API, at the rack through its own API and the simulator's admin listener,
// and at the nodes through what runs in them.
//
// # Writing a spec
//
// The suite needs the build tag e2e, since it needs a cluster. Every spec gets a namespace of its
// own (fixture), which is gone when the spec ends, and then the ledger: rack, loop devices, mounts
// and state of every node have to be as they were when it began.
//
//	It("CU-1 a volume keeps its data when its pod moves", func(ctx SpecContext) {
//		claim := f.Claim(ctx, Claim{})                               // 1 GiB, oxide-disk
//		writer := f.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[0]})
//		writer.Running(ctx)
//		writer.Sh(ctx, "echo kept > /data/0/file && sync")
//		writer.Delete(ctx)
//		reader := f.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[1]})
//		Expect(reader.Running(ctx).Sh(ctx, "cat /data/0/file")).To(Equal("kept"))
//	})
//
// A container runs on when its instance is stopped. A spec in which instances are stopped and
// started begins with guestsFollow: then a stop halts the node, as on a rack, before
// its disks go, and a start boots it. servesSinceBoot and RunningSinceBoot wait for what comes
// back, for Kubernetes reports what ran before the halt until the node speaks again. After that,
// installKeeper lets the node keeper stop and start them, until the specs of the container end.
package e2e
