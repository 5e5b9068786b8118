// Package corpus proves that the driver formats a disk only when it is proven blank, or proven to
// be its own unfinished format.
package corpus
