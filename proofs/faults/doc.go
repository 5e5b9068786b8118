// Package faults proves that the driver behaves correctly if a rack answers wrongly. Each operation
// that the driver uses gets every wrong answer, in every phase: the rack makes the operation's
// change before the wrong answer, after it, or never.
//
// A cell of the matrix consists of an operation, a phase, an answer, and a CSI call that uses the
// operation. The test makes the call once with the fault, and then repeats it without the fault, as
// an orchestrator does. With the fault, the call must return a code that the table allows. If it
// returns OK, it must have its effect, and the response must be right. After the repetition the
// rack must have exactly the effect of the call. The cells of attach and detach also run on a rack
// that detaches no disk from a running instance, and on one that records an attach first and
// refuses without a reason. The test also observes which operations each call uses. Together they
// must be the operations that the driver's source uses.
//
// By default, the test tries every operation with every answer, in two phases, with random calls.
// The short form tries one answer for each operation. The long form also tries all other cells,
// until its time is over. FAULTS_CELL is the name of a cell, or a pattern of names, to run alone.
package faults
