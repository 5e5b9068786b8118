// Package faults proves that the driver behaves correctly if a rack answers wrongly. Every
// operation that the driver uses gets every kind of wrong answer, in every phase: without an
// effect, after it, or before it.
//
// A cell of the matrix consists of an operation, a phase, an answer, and a CSI call that uses the
// operation. The call is made once with the fault, and then repeated without it, as an orchestrator
// does. With the fault, it must return a code that the table allows. If it returns OK, it must have
// its effect, and the response must be right. After the repetition the rack must have exactly the
// effect of the call, and nothing more. The cells of attach and detach also run on a rack that
// detaches no disk from a running instance, and on one that records an attach first and refuses
// without a reason. The operations of each call are observed. Together they must be the operations
// that the driver's source uses.
//
// Every operation is run with every answer, in two phases and with calls that the seed chooses. The
// short form runs every operation with one answer. The long form runs every cell, and then repeats
// them in other orders until its time is over. FAULTS_CELL is the name of a cell, or a pattern of
// names, to run alone.
package faults
