// Package controller is CSI's controller service. Each RPC parses its request, decides from the
// state of the rack, makes one change, and builds its response.
//
// Files: service.go, then one for each group of RPCs: volume.go (create and delete), publish.go and
// unpublish.go, snapshot.go, list.go, capacity.go, validate.go, health.go. Shared: volume_spec.go
// and snapshot_spec.go (parsed creates), disk.go (a disk in CSI's terms), own.go (which disks this
// driver made), late.go (changes whose outcome a response leaves open).
//
// It keeps no state between calls, never stops an instance, and deletes nothing without this
// cluster's ownership tag.
package controller
