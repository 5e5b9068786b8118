// Package fuzz runs every fuzz target of the module in turn: their seeds in the short form, and in
// the long one the fuzzer, for an equal share of the time.
package fuzz
