// Package faults proves what the driver makes of a rack that answers wrongly: every operation that
// the driver asks a rack for, struck before, instead of, after, beside and long before its effect,
// with every kind of wrong answer.
//
// A cell is an operation, a phase, an answer, and a CSI call that needs the operation. The call is
// made once with the fault in force, and then repeated without it, as an orchestrator does. The
// fault must give the code that the error table promises; an OK must be true, in the rack's state
// and in its words; and after the repetition the rack must be in the state that the call was to
// bring about, with nothing more in it. Which calls need which operations is observed, not written
// down, and the union of them must be what the driver's source asks a rack for.
//
// The short form runs every operation with every answer, in two phases and with calls that the seed
// chooses; the long form runs every cell, and then again in another order until its time is up.
// FAULTS_CELL names one cell, or a pattern of them, to run alone.
package faults
