// Package vm tests instances that are virtual machines. They have real devices, kernels and boots,
// which the simulator's guest views only imitate (package simulator/machine). make vm and make
// rehearsal install QEMU, make an image, and run these tests.
package vm
