// Package audit finds what the driver made on a rack and nobody wants any more: the disk of a
// create whose caller never came again, or of a volume that was deleted past the driver. It deletes
// such an orphan when an operator asks for it, a second audit confirms it, and no rule keeps it.
//
// To read: options.go (what an operator may ask), audit.go (the steps), inventory.go (what the rack
// has), wanted.go (what somebody wants, from a file or from kubectl), decide.go (the rules),
// state.go (what earlier audits saw), report.go.
package audit
