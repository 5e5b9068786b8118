// Package crash proves that every RPC converges even if its process is killed before the RPC
// has ended.
//
// A lifecycle is a history of package model, whose model checks the state after every step. A dry
// run takes volumes of every kind through their lifecycles and numbers the external effects of the
// driver and of the programs that it runs: requests to the rack, writes, mounts, ioctls. Each
// effect is a point. In a trial, a new volume begins such a lifecycle, and the unmodified driver is
// killed with SIGKILL immediately before or after the effect, and started again. Then the
// orchestrator repeats its call, or gives up, or moves the volume to another node. The trial must
// converge: all calls succeed in the end, all data that a workload has written are there, and
// nothing is left. In the same way the simulator is killed at the effects of its durable changes.
// In one kind of lifecycle the rack records an attach without giving the instance a device.
//
// Bystanders, and files in which the workload has forged records of the driver, are checked after
// the calls and must not change (package proof).
//
// A point is identified by the program, the call and the target of its effect, and by the number of
// earlier effects with these. So a trial need not have the same effects as the dry run.
//
// CRASH_ONLY selects points by their names. A failure prints the value and the seed for its trial.
package crash
