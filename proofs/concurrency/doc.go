// Package concurrency proves two promises about calls at the same time: a missing, late or wrong
// answer of the rack, or another controller, never undoes acknowledged work; and a disk that hangs
// or fails delays only calls for its own volume. Package model has a test with many callers.
package concurrency
