// Package concurrency proves that any number of callers see one state. Many processes and many
// callers work at once, on one volume and on many. For each name they leave one disk with one
// filesystem, and one mount at each path, and when they are done they leave nothing. Three
// other disks of a node do not change meanwhile.
package concurrency
