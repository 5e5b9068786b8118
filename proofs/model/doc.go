// Package model proves the driver against a small model of volumes, nodes and data. A history
// is a list of steps of an orchestrator that repeats, reorders, duplicates and abandons its
// calls, with several volumes, two controllers and three nodes, while faults are injected and
// processes die. After each step the model must allow the joint state of the rack, the devices
// and the mounts. Three other disks of a node never change, and files in which a pod has
// forged records of the driver never change either (package proof). Many callers at once are
// steps with many calls (crowd_test.go).
//
// Read these files first: world_test.go (the objects, and the effect of each call),
// codes_test.go (the allowed answers of a call), data_test.go (the content of the disks),
// step_test.go (the steps and their text), check_test.go (the checks after each step). The
// other files generate histories and run them.
package model
