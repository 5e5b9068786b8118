// Package crash proves that every RPC converges even if its process is killed before the RPC
// has ended.
//
// A dry run takes volumes of every kind through their lifecycles and numbers the effects of
// the driver, and of the programs that it runs, on the world: requests to the rack, writes,
// mounts, ioctls. These effects are the points. For each point, a new volume begins such a
// lifecycle. The unmodified driver is killed with SIGKILL immediately before or after the
// effect and started again. Then the orchestrator repeats its call, or gives up, or moves the
// volume to another node. The result must converge: the same end, all data that a workload has
// written, and nothing left over. In the same way, the simulator is killed at each effect that
// it makes durable. One kind of lifecycle has a rack that records an attach without giving the
// instance a device.
//
// Three other disks of an instance are checked after every call and must not change. Files in
// which the workload has forged records of the driver must not change either (package proof).
//
// A point is identified by the program, the call and the target of its effect, and by the
// number of effects with the same name before it. So a run need not have the same number of
// effects as the dry run.
//
// CRASH_ONLY repeats one run. A failure prints the value for it.
package crash
