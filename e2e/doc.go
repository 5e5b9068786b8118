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
// (s, a fixture), which is deleted when the spec ends. After that an inventory of the rack, the
// loop devices, the cluster's volumes and every node is compared with that before the spec; they
// have to be the same.
//
//	It("keeps a volume's data when its pod moves (D-1)", func(ctx SpecContext) {
//		claim := s.Claim(ctx, Claim{})                               // 1 GiB, oxide-disk
//		writer := s.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[0]})
//		writer.Running(ctx)
//		writer.Sh(ctx, "echo kept > /data/0/file && sync")
//		writer.Delete(ctx)
//		reader := s.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[1]})
//		Expect(reader.Running(ctx).Sh(ctx, "cat /data/0/file")).To(Equal("kept"))
//	})
//
// A node is a container, which the rack cannot stop with its instance. So a spec in which instances
// are stopped and started begins with guestsFollow. From then on a stop halts the node before its
// disks are detached, as on a rack, and a start boots it. servesSinceBoot and RunningSinceBoot wait
// until node and pod are back: until the node reports again, Kubernetes shows the state from before
// the stop. After guestsFollow, installKeeper installs the node keeper until the specs of the
// Ginkgo container end.
package e2e
