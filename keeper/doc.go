// Package keeper implements oxide-node-keeper. It does in a Kubernetes cluster what the driver must
// not do: it stops and starts the instances of nodes. It has three duties, and a switch for each.
//
// Cold attach: racks without hot-plug attach and detach a disk only while its instance is stopped.
// The keeper looks for VolumeAttachments that wait for a stop. If the node's owner allows it, the
// keeper stops the instance, wakes the attacher, and starts the instance again. See cold.go.
//
// Startup taint: a node joins with a taint, which the keeper removes when the driver is registered
// there. See fence.go.
//
// Leaving nodes: a node whose instance the rack reports as stopped or destroyed gets the
// out-of-service taint, so that Kubernetes moves its pods at once. See fence.go. A Leaver in the
// node's pod keeps the driver until the node's volumes are detached. See leave.go.
//
// A person can use a Mover to move a volume that stays with its node. See move.go.
//
// The keeper keeps only one thing in memory: the instances that it has stopped. It starts them
// again even if the API server is unreachable (debt.go). Each Round reads the cluster and the rack,
// decides, and does at most one thing for a node. The keeper records in a ConfigMap what it is
// about to do (record.go), so that any keeper can continue what another one began.
package keeper
