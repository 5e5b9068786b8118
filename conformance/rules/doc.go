// Package rules has the assumptions of the driver and the simulator about a rack's API, as
// numbered rules that can be checked on any rack.
//
// A [Rule] has an ID (A01, A02, …), states what a rack does, why we rely on it and how we know
// it, and has a check. [All] lists the rules of ASSUMPTIONS.md. The simulator's code cites the ID of
// a rule where it implements the rule, and a test compares the two.
//
// A check uses Oxide's own client, or plain HTTP if that client hides the answer. It creates
// objects in one project, under the mark of its run, and removes them. [Rack.Run] runs a check
// and returns a [Result] with every request and answer:
//
//	rack, err := rules.Open(rules.Config{Host: …, Token: …, Project: …, Mark: "1a2b3c4d"})
//	for _, rule := range rules.All() {
//		result := rack.Run(ctx, rule)
//		…
//	}
//	err = rack.Close(ctx)
//
// Some situations cannot be caused from outside, such as a saga that fails halfway, or a rack
// without space. The rules about them are checked on the simulator, through its admin listener.
// On a real rack their result is "not tested".
//
// # Writing a check
//
// A check is a function of a [Check]. It ends at the first problem after which it cannot
// continue:
//
//	func checkRepeatedAttach(c *Check) {
//		disk, instance := c.Disk(), c.StoppedInstance()
//		c.Attach(disk, instance)
//		again, err := c.AttachAgain(disk, instance)
//		…
//	}
//
// If the driver looks before the operation, the rule names that call in Look, and a test compares
// it with the driver's calls. A mutation in simulator/broken breaks the rule; if that endangers
// the driver, its DriverSays names the reason with which the driver has to refuse.
//
// Two tests try the checks themselves. One alters every field of the rack's answers in turn: a
// check must fail, or irrelevant names the field and why nobody relies on it. The other does the
// same with every request and every fault: a fault that the network or a rack in order may cause
// fails no check and leaves nothing behind; every other one fails a check, or unnoticeable
// explains why none can notice it.
//
// The package does not use Ginkgo, and knows the rack by its API only.
package rules
