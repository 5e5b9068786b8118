// Package faults proves that the driver behaves correctly if a rack answers wrongly. Every
// operation that the driver uses gets every kind of wrong answer: before, instead of, after,
// together with, and long before its effect.
//
// A cell consists of an operation, a phase, an answer, and a CSI call that needs the
// operation. The call is made once with the fault, and then repeated without it, as an
// orchestrator does. The call with the fault must return the code of the error table. If it
// returns OK, this must be true, both in the rack's state and in the response. After the
// repetition the rack must have exactly the state that the call has as its effect, and nothing
// more. The cells of attach and detach also run on a rack that detaches no disk from a running
// instance, and on one that records an attach first and refuses without a reason. The operations
// that each call needs are observed and not written down. All of them together must be the
// operations that the driver's source uses.
//
// Every operation is run with every answer, in two phases and with calls that the seed chooses. The
// short form runs every operation with one answer. The long form runs every cell,
// and then repeats them in other orders until its time is over. FAULTS_CELL is the name of one
// cell, or a pattern of several, to run alone.
package faults
