// Package fuzz runs every fuzz target of the module. The short form runs the seeds of the
// targets. The long form runs the fuzzer on each target for an equal share of the time.
package fuzz
