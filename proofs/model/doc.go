// Package model proves the driver against a small model of volumes, nodes and data. A history is a
// list of steps of an orchestrator that repeats, reorders, duplicates and abandons its calls, over
// several volumes, two controllers and three nodes, while faults are injected and processes die.
// After each step the joint state of the rack, the devices and the mounts has to be one that the
// model allows.
// Three other disks of a node never change, and nor do files in which a pod has forged records of
// the driver (package proof).
//
// To read: world_test.go (what there can be and what each call does to it), codes_test.go (what a
// call may answer), data_test.go (what the disks hold), step_test.go (the steps, as text too),
// check_test.go (what must hold after each). The rest makes histories and carries them out.
package model
