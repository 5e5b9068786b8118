// Package concurrency proves two promises. A missing, late or wrong answer of the rack, or another
// controller, never undoes acknowledged work. A disk that hangs or fails delays only calls for its
// own volume. Package model tests many calls at the same time.
package concurrency
