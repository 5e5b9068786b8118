// Package claim gives a claim another disk: a larger one, or one that holds what a snapshot of the
// claim holds. The claim keeps its name and its workload. A rack resizes no disk and reverts none,
// so the new disk is made from a snapshot, and the claim is made again for it.
//
// A change is a table of steps. Each step reads from the cluster's objects whether it has been
// done, so the command may be killed anywhere and repeated. The plan is an annotation of the
// earlier PersistentVolume, which is kept until somebody forgets it. Everything is done by the
// user's kubectl, with the user's rights.
package claim
