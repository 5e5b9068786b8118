// Package rules has what the driver and the simulator believe of a rack's API, as numbered rules
// that can be checked on any rack.
//
// A [Rule] has an ID (A01, A02, …), says what a rack does, why we rely on it and where we know it
// from, and has a check. [All] lists them. simulator/ASSUMPTIONS.md is their table, written by a
// test of this package; the simulator's code cites a rule's ID where it imitates it, and the test
// compares.
//
// A check uses Oxide's own client, or plain HTTP for what that client hides. It makes what it needs
// in one project, under the mark of its run, and removes it. [Rack.Run] runs it and returns a
// [Result] with every exchange that it had with the rack:
//
//	rack, err := rules.Open(rules.Config{Host: …, Token: …, Project: …, Run: "1a2b3c4d"})
//	for _, rule := range rules.All() {
//		result := rack.Run(ctx, rule)
//		…
//	}
//	err = rack.Close(ctx)
//
// Some situations cannot be brought about from outside: a saga that fails halfway, a rack without
// space. Their rules are checked on the simulator, through its admin listener, and are not tested
// elsewhere; the result says so.
//
// # Writing a check
//
// A check is a function of a [Check], which ends at the first thing that it cannot go on without:
//
//	func checkRepeatedAttach(c *Check) {
//		disk, instance := c.Disk(), c.StoppedInstance()
//		c.Attach(disk, instance)
//		again, err := c.AttachAgain(disk, instance)
//		…
//	}
//
// The package does not use Ginkgo and knows the rack only by its API.
package rules
