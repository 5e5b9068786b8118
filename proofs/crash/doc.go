// Package crash proves that every RPC reaches its result in the end, even if its process is killed
// at any time.
//
// A lifecycle is a history of package model, which checks the state after every step. A dry run
// takes volumes of every kind through their lifecycles and numbers the external effects of the
// driver and its tools: requests to the rack, writes, mounts, ioctls. A point is right before or
// after an effect, or between a request and its answer. A trial repeats a lifecycle with a new
// volume, kills the unmodified driver with SIGKILL at one point, and starts it again. Then the
// orchestrator repeats its call, gives up, or moves the volume to another node. The trial must
// converge: all calls succeed in the end, all data that a workload has written exist, and nothing
// is left. Other trials kill the simulator at its own effects. In one kind of lifecycle the rack
// records an attach without giving the instance a device.
//
// The calls must not change bystanders (disks that no call names), or files in which the workload
// has forged the driver's records (package proof).
//
// An effect is identified by its program, its call, its target, and the number of earlier effects
// with the same three values.
//
// CRASH_ONLY selects points by name. A failed trial prints the value and the seed that repeat it.
package crash
