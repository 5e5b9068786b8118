// Package concurrency proves what calls may do to each other: nothing that was acknowledged is
// undone by an answer that is missing, late or wrong, or by another controller, and a disk in
// trouble holds up only its own volume. Many callers at once are a test of package model.
package concurrency
