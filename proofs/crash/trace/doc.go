// Package trace follows a running process with ptrace, numbers its effects on the world, and
// kills the process at a chosen effect. The process is an unmodified one, as users run it.
//
// A tracer is a process of its own (Serve), for two reasons. The kernel binds a traced process
// to one thread of its tracer, and a parent that waits for a traced child wakes up at each
// stop of the child. A Watcher starts a tracer and gives it orders.
package trace
