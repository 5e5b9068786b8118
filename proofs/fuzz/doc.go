// Package fuzz runs the seeds of every fuzz target of the module. The long form runs the fuzzer on
// each target for an equal share of the time.
package fuzz
