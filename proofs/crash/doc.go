// Package crash proves that no RPC needs its process to live to the end of it.
//
// A dry run takes volumes of every kind through their lifecycles and numbers what the driver, and
// the programs that it runs, do to the world: requests to the rack, writes, mounts, ioctls. These
// are the points. Then, for each point, a new volume begins such a lifecycle. The unmodified driver
// is killed with SIGKILL right before or right after that effect and started again, and the
// orchestrator repeats its call, or gives up, or moves the volume to another node. It must
// converge: the same end, what a workload has written still there, and nothing left over. The
// simulator is treated in the same way at everything that it makes durable.
//
// Three other disks of an instance are looked at after every call, and may not change; nor may
// files in which the workload has forged records of the driver (package proof).
//
// A point is an effect's program, call, target and how many of that name came before it, so a run
// need not have as many effects as the dry run had.
//
// CRASH_ONLY repeats one run; a failure prints its value.
package crash
