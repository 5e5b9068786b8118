// Package crash proves that every RPC converges even if its process is killed before the RPC has
// ended.
//
// A lifecycle is a history of package model, whose model checks the state after every step. A dry
// run takes volumes of every kind through their lifecycles and numbers the external effects of the
// driver and of the programs that it runs: requests to the rack, writes, mounts, ioctls. Each
// effect is a point. A trial repeats a lifecycle with a new volume, kills the unmodified driver
// with SIGKILL immediately before or after one effect, and starts it again. Then the orchestrator
// repeats its call, gives up, or moves the volume to another node. The trial must converge: all
// calls succeed in the end, all data that a workload has written exist, and nothing is left. Other
// trials kill the simulator at the effects of its durable changes. In one kind of lifecycle the
// rack records an attach without giving the instance a device.
//
// After the calls, bystanders, and files in which the workload has forged records of the driver,
// must be unchanged (package proof).
//
// A point is identified by the program, the call and the target of its effect, and by the number of
// earlier effects with the same three. So a trial need not have the same effects as the dry run.
//
// CRASH_ONLY selects points by their names. A failure prints the value and the seed for its trial.
package crash
