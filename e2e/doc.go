// Package e2e tests what users install, on a kind cluster of one control plane and two workers: the
// driver's own images and the manifests of package deploy, applied as a user applies them. Kubelets
// and sidecars are the real ones. A pod on the control plane simulates the rack. Each worker is an
// instance of that rack, and the rack shows the instance's /sys and /dev in a directory, the guest
// view, that is mounted in the worker.
//
// README.md has the commands that run the suite.
//
// The package imports no code of the driver. Of the simulator it imports only the admin listener's
// types. It reads claims, pods and events through the Kubernetes API, the rack through its own API
// and the simulator's admin listener, and the nodes with commands that run in them.
//
// # Writing a spec
//
// The suite has the build tag e2e, since it needs a cluster. Every spec gets its own namespace (s,
// a fixture). When the spec ends, the suite deletes the namespace, and waits until the rack, the
// loop devices, the cluster's volumes and every node are as they were before the spec.
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
// A node is a container, which the simulated rack cannot stop when it stops an instance. So a spec
// that stops instances first calls guestsFollow. From then on, when an instance is stopped, the
// suite halts its node before the rack detaches its disks. When an instance is started, the suite
// boots its node. After a boot the Kubernetes API shows the state from before the stop until the
// node reports: wait with servesSinceBoot and RunningSinceBoot. After guestsFollow, installKeeper
// installs the node keeper until the specs of the Ginkgo container end.
package e2e
