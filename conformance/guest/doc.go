// Package guest works inside an instance of the rack. It runs the driver's node service there,
// and writes and verifies the content of volumes.
//
// An [Agent] does the work. [Here] starts one in this process. [Connect] copies this program into
// another instance, through a command such as "ssh b", and starts it there as an agent that
// serves its standard streams ([Serve]). Both return a [AgentClient] with the same methods:
//
//	here, err := guest.Here(ctx, config)
//	there, err := guest.Connect(ctx, []string{"ssh", "b"}, config)
//	…  csi.NewNodeClient(there.Conn()).NodeStageVolume(ctx, …)
//	…  there.Write(ctx, guest.Writing{Place: place, Pattern: pattern, Sync: true})
//	report, err := there.Verify(ctx, place, pattern)
//
// # What is written
//
// A [Pattern] is a row of [BlockBytes] blocks. Each block contains its number, its generation,
// its owner's seed and a checksum. So the content at the place of a block identifies the error:
// zeros, another generation, another block, a block of another volume, or garbage ([Finding]). A
// writer ([Guest.StartWriter]) appends such blocks one by one and counts those that fsync
// acknowledged. Reads bypass the page cache (O_DIRECT), so that the data comes from the disk.
//
// # What is left behind
//
// Nothing. An agent keeps its files in a tmpfs of its own mount namespace, and the driver dies
// with it. However the agent ends, its mounts are gone when its last process is. The program that
// calls Here must itself run in such a namespace (package namespace). Only an agent that is
// killed leaves an empty directory, which the next agent there removes.
//
// The package needs Linux and root. On other systems it builds, and Here and Serve fail.
package guest
