// Package adminapi has the wire types of the simulator's admin listener, and a client for it.
//
// Tests and operators watch and disturb a simulated rack through the admin listener. It lists the
// requests that the rack has answered ([Request]), injects faults ([Fault]), changes settings of
// the running rack ([Switches]) and dumps everything that the rack has ([State]). A real rack has
// no such interface. [Routes] lists the requests that it answers; GET / shows the same list,
// and a browser the rack's page. The listener refuses what only a browser's page from elsewhere
// sends: a name other than localhost in Host, another Origin, or a change without a token that
// comes from a browser.
//
// The simulator serves these types and the suites use the client, so both use one definition. The
// package imports no other package of this module, and a client needs no other.
package adminapi
