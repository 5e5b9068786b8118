// Package trace follows a running process with ptrace, numbers what it does to the world, and kills
// it at a chosen place. The process is the one that users run: it knows nothing of this.
//
// A tracer is a process of its own (Serve), for two reasons. The kernel binds a tracee to one
// thread of its tracer; and a parent that waits for a traced child is woken by each of its stops.
// Watcher is the other end of it, for those who drive.
package trace
