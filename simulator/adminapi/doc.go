// Package adminapi has the wire types of the simulator's admin listener, and a client for it.
//
// The admin listener lets tests and operators watch and disturb a simulated rack: it lists the
// requests that the rack has answered ([Request]), injects faults ([Fault]), changes settings of
// the running rack ([Switches]) and dumps what the rack has ([State]). A real rack has nothing of
// the kind.
//
//	GET    /requests[?since=SEQ]   the request log
//	DELETE /requests               empties it; the numbers go on
//	GET    /faults                 the active faults, with how often each fired
//	POST   /faults                 adds a Fault; answers {"id":…}
//	DELETE /faults[/ID]            removes all faults, or one
//	POST   /deferred               carries out now what faults of the phase deferred and the switch
//	                               free_delay hold back; answers when it is done
//	GET    /mutations              the ways in which the rack can be told to break its rules
//	PUT    /mutations/NAME         lets it break one, in the place of any other
//	DELETE /mutations              puts it in order
//	GET    /switches               the Switches
//	PATCH  /switches               changes those that are named
//	GET    /state                  the State
//	GET    /metrics                Prometheus
//	GET    /debug/pprof/goroutine  the stacks of all goroutines, with ?debug=1 as text
//
// The simulator serves these types and the suites use the client, so both are built from one
// definition. The package imports nothing else of this module, and a client needs only it.
package adminapi
