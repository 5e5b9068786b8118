// Package concurrency proves that any number of callers get one truth: many processes and many
// callers at once, on one volume and on many, leave one disk of one name, one filesystem on it, one
// mount at a path, and nothing at all when they are gone. Three other disks of a node do not change
// meanwhile.
package concurrency
