// Package harness runs the driver and a simulated rack as processes and observes them from outside.
// The specs, the proofs, the benchmarks, the demo and the cluster's suite share it.
//
// A [Run] has a directory that contains everything that the run makes. [Run.StartRack] starts an
// oxide-simulator, [Rack.StartPlugin] an oxide-csi-plugin in one of the rack's instances. Both
// programs are built on first use, with the race detector if this binary has it. An [Environment]
// is a rack with its drivers and a ledger from the start; the proofs build their own on it.
//
//	run := harness.RunFor(t)
//	rack, err := run.StartRack(ctx, harness.RackOptions{})       // instances a and b
//	all, err := rack.StartPlugin(ctx, harness.PluginOptions{})   // mode all, in a
//	start, err := rack.Ledger(ctx, all)
//	…  all.Controller().CreateVolume(ctx, harness.CreateRequest("name"))
//	err = rack.Balance(ctx, start, all)                          // nothing may leak
//	err = errors.Join(all.Stop(), rack.Stop())
//
// [CreateRequest] and the functions beside it build the controller's requests, and a [Placement]
// makes the node's calls for a volume. [Data] writes and verifies the data of a workload in a
// volume. [Await] and [Backoff] wait, [Share] gives jobs to workers, and a trial ends at a step
// that fails ([Must], [Catch]). [Rack.Admin] injects faults and reads the request log.
// [Rack.Client] is Oxide's own client, with which an administrator works without the driver.
//
// A [Ledger] counts what exists: the rack's objects, loop devices, mounts, and the processes' open
// files and goroutines. Stop returns an error if a process fails or leaves something behind. Every
// error that a driver answers is checked against the rules for errors ([ErrorRules]).
//
// The package uses only the flags, the environment, the sockets and the HTTP of driver and rack.
// It does not use Ginkgo and ends no test by itself. It needs Linux and root; on other systems its
// functions return an error.
package harness
