// Package guest works inside an instance of the rack: it runs the driver's node service there, and
// writes and verifies what volumes hold.
//
// An [Agent] does the work. [Here] starts one in this process; [Connect] copies this program into
// another instance, through a command such as "ssh b", and starts it there as an agent that serves
// its standard streams ([Serve]). Both return a [Guest], on which the same calls are made:
//
//	here, err := guest.Here(ctx, config)
//	there, err := guest.Connect(ctx, []string{"ssh", "b"}, config)
//	…  csi.NewNodeClient(there.Conn()).NodeStageVolume(ctx, …)
//	…  there.Write(ctx, guest.Writing{Place: place, Pattern: pattern, Sync: true})
//	report, err := there.Verify(ctx, place, pattern)
//
// # What is written
//
// A [Pattern] is numbered blocks of [BlockBytes], each with its number, its generation, its owner's
// seed and a checksum. So what is found in the place of a block tells what went wrong: zeros,
// another generation, another block, another volume's, or garbage ([Finding]). A writer
// ([Guest.StartWriter]) appends such blocks one by one and counts those that fsync acknowledged.
// Reads bypass the page cache (O_DIRECT), so that the disk answers.
//
// # What is left behind
//
// Nothing. An agent keeps its files in a tmpfs of its own mount namespace, and the driver dies with
// it: whatever ends the agent, its mounts are gone when its last process is. Here, the program
// itself has to run in such a namespace (package namespace). Only an agent that is killed leaves an
// empty directory, which the next one there removes.
//
// The package needs Linux and root. On other systems it builds, and Here and Serve fail.
package guest
