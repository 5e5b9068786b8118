// Package claim gives a claim another disk: a larger one, or one that holds what a snapshot of the
// claim holds. The claim keeps its name and its workload. A rack resizes no disk and reverts none,
// so the new disk is made from a snapshot, and the claim is made again for it.
//
// From before the snapshot until the claim exists again there is no claim of its name, so no pod
// can use either disk: the earlier one belongs to a claim of the command's own, and so does the new
// one until it has been proven to be what was asked for. The point of no return is what Kubernetes
// does, not what the command intends: the first binding of the new disk to the claim.
//
// A change is a table of steps. Each step reads from the cluster's objects whether it has been
// done, so the command may be killed anywhere and repeated. The plan is an annotation of the
// earlier PersistentVolume, which is kept until somebody forgets it. Whatever is changed is named
// with its UID and its resource version, so a request of a run that was taken over changes nothing.
// Everything is done by the user's kubectl, with the user's rights.
package claim
