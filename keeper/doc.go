// Package keeper is oxide-node-keeper, which does in a Kubernetes cluster what the driver must not
// do: it stops and starts the instances of nodes. It has three duties, each with a switch.
//
// Cold attach: racks without hot-plug attach and detach a disk only while its instance is stopped.
// The keeper looks for VolumeAttachments that wait for that, and for a node whose owner allows it
// stops the instance, lets the attacher work, and starts the instance again. See cold.go.
//
// Startup taint: a node joins with a taint, which the keeper removes when the driver is registered
// there. See taint.go.
//
// Leaving nodes: a node whose instance the rack reports as stopped or destroyed gets the
// out-of-service taint, so that Kubernetes moves its pods at once. See fence.go. A Leaver in the
// node's pod keeps the driver until the node's volumes are detached. See leave.go.
//
// For people there is a Mover, which moves a volume that stays with its node. See move.go.
//
// The keeper has no memory, but for the instances that it has stopped itself: those it starts also
// if the API server is gone meanwhile (debt.go). Each Round reads the cluster and the rack,
// decides, and does at most one thing for a node; what it is about to do to a node is recorded on
// the Node first (record.go), so that any keeper can continue what another one began.
package keeper
