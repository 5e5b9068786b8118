// Package trace follows a running, unmodified process with ptrace, numbers its external effects,
// and kills or pauses the process at a chosen effect.
//
// A tracer is a process of its own (Serve), for two reasons: the kernel binds a traced process to
// one thread of its tracer, and the parent of a traced process would be woken at each of its stops.
// A Watcher starts a tracer and gives it orders.
package trace
