// Package adminapi has the wire types of the simulator's admin listener, and a client for it.
//
// The admin listener lets tests and operators watch and disturb a simulated rack: it lists the
// requests that the rack has answered ([Request]), injects faults ([Fault]), changes settings of
// the running rack ([Switches]) and dumps what the rack has ([State]). A real rack has nothing of
// the kind. [Routes] lists what it answers; GET / shows the same list.
//
// The simulator serves these types and the suites use the client, so both are built from one
// definition. The package imports nothing else of this module, and a client needs only it.
package adminapi
