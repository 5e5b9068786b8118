// Package audit finds orphans: disks and snapshots that the driver made on a rack and that nobody
// wants any more, because a create was never repeated or a volume was deleted without the driver.
// It deletes an orphan if an operator asks for it, an earlier audit saw it too, and there is no
// skip reason.
//
// Files: options.go (flags), audit.go (the steps), inventory.go (the objects on the rack),
// wanted.go (the wanted objects, from a file or from kubectl), decide.go (the rules), state.go
// (what earlier audits saw), report.go.
package audit
