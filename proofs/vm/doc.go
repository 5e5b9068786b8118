// Package vm proves, with instances that are virtual machines, what the simulator's guests can only
// imitate: their own devices, kernel and boot (package simulator/machine). make vm and make
// rehearsal install QEMU, make an image, and run these tests.
package vm
