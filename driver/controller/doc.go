// Package controller is CSI's controller service: each RPC reads its request, decides from what the
// rack shows, does one thing to the rack, and builds its answer.
//
// To read: service.go (what there is), then a file for each RPC: volume.go (create and delete),
// publish.go and unpublish.go, snapshot.go, list.go, capacity.go, validate.go, health.go. What they
// share: volume_order.go and snapshot_order.go (what a create asks for), disk.go (a disk in CSI's
// words), own.go (which disks are this driver's), twins.go (disks that a guest cannot tell apart),
// effect.go (answers that leave open what was done).
//
// It keeps nothing between calls, never stops an instance, and deletes nothing that does not carry
// this cluster's tag.
package controller
