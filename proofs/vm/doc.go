// Package vm tests instances that are virtual machines. They have real devices, kernels and boots,
// which the simulator's guest views only imitate (package simulator/machine). The targets vm and
// rehearsal of the Makefile install QEMU, build an image, and run these tests.
package vm
