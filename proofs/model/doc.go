// Package model compares the driver with a small model of volumes, nodes and data. A history is a
// list of steps. Most steps are calls of an orchestrator, which repeats, reorders, duplicates and
// abandons them, for several volumes at two controllers and three nodes. Others are faults of the
// rack and kills of processes. After each step the model must allow the state of the rack, the
// devices and the mounts. Disks that no call names, and files with forged records of the driver,
// must never change (package proof). A step may have many calls at once (crowd_test.go). Package
// crash runs histories of its own, and kills processes in the middle of a step.
//
// Read these files first: world.go (objects, effects of calls, and allowed answers), step.go (steps
// and the orchestrator), acts.go (content of disks, and acts of pods), check.go.
package model
