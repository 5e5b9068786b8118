// Package vm proves with instances that are virtual machines what the simulator's guests can only
// imitate: devices, a kernel and a boot of their own (package simulator/machine). Without QEMU or an
// image its tests are skipped, and say what to install.
package vm
