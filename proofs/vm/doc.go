// Package vm proves with instances that are virtual machines what the simulator's guests can only
// imitate: devices, a kernel and a boot of their own (package simulator/machine). Its tests run in
// make vm and make rehearsal, which install QEMU and make an image.
package vm
