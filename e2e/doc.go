// Package e2e tests what users install on a Kubernetes cluster: a kind cluster of one control plane
// and two workers, the real kubelet, the real sidecars, the driver's own images, and the manifests
// of package deploy, applied as a user applies them. The rack is simulated and runs as a pod of the
// control plane. Each worker is one of its instances, and has that instance's view of /sys and /dev
// mounted.
//
// README.md has the commands that run the suite.
//
// The package uses no code of driver or simulator. It reads claims, pods and events through the
// Kubernetes API, the rack through its own API and the simulator's admin listener, and the nodes
// with commands that run in them.
//
// # Writing a spec
//
// The suite has the build tag e2e, since it needs a cluster. Every spec gets a namespace of its own
// (fixture), which is deleted when the spec ends. After that the ledger compares rack, loop
// devices, mounts and state of every node with those before the spec; they have to be the same.
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
// A container continues to run when its instance is stopped. So a spec in which instances are
// stopped and started begins with guestsFollow. Then a stop halts the node before its disks are
// detached, as on a rack, and a start boots it. servesSinceBoot and RunningSinceBoot wait until
// node and pod are back: until the node reports again, Kubernetes still shows what ran before.
// After guestsFollow, installKeeper makes the node keeper stop and start instances until the specs
// of the container end.
package e2e
