package adminapi

// Route is a request that the admin listener answers.
type Route struct {
	Method string `json:"method"`
	Path   string `json:"path"`
	Does   string `json:"does"`
	// Body is an example of the request's body, or "" if it has none.
	Body string `json:"body,omitempty"`
}

// Routes lists the requests that the admin listener answers, except GET /. A path may have names
// in braces.
var Routes = []Route{
	{Method: "GET", Path: "/requests", Does: "the request log; ?since=SEQ leaves out what is known"},
	{Method: "DELETE", Path: "/requests", Does: "empties the log; the numbers go on"},
	{Method: "GET", Path: "/faults", Does: "the active faults, with how often each fired"},
	{Method: "POST", Path: "/faults", Does: "adds a fault, and answers its id",
		Body: `{"operation": "disk_create", "phase": "after", "times": 1, "cut": true}`},
	{Method: "DELETE", Path: "/faults", Does: "removes all faults"},
	{Method: "DELETE", Path: "/faults/{id}", Does: "removes a fault"},
	{Method: "GET", Path: "/disks/{disk}/faults", Does: "how the disk with that ID fails, if " +
		"disks are such that can (--disks=fuse)"},
	{Method: "POST", Path: "/disks/{disk}/faults", Does: "lets the disk fail",
		Body: `{"on": ["write", "flush"]}`},
	{Method: "DELETE", Path: "/disks/{disk}/faults", Does: "heals the disk"},
	{Method: "POST", Path: "/deferred", Does: "carries out now what faults of the phase deferred " +
		"and the switch free_delay hold back; answers when it is done"},
	{Method: "POST", Path: "/reset", Does: "puts the rack back to its start, without faults and " +
		"with an empty log; answers when it is done"},
	{Method: "GET", Path: "/mutations", Does: "the ways in which the rack can be told to " +
		"break its rules"},
	{Method: "PUT", Path: "/mutations/{name}", Does: "lets it break one, in the place of any other"},
	{Method: "DELETE", Path: "/mutations", Does: "puts the rack in order"},
	{Method: "GET", Path: "/switches", Does: "settings of the running rack"},
	{Method: "PATCH", Path: "/switches", Does: "changes those settings that are named",
		Body: `{"hotplug": "none"}`},
	{Method: "GET", Path: "/state", Does: "what the rack has: disks, instances, snapshots, devices"},
	{Method: "GET", Path: "/metrics", Does: "metrics of the process, for Prometheus"},
	{Method: "GET", Path: "/debug/pprof/goroutine", Does: "the stacks of all goroutines; " +
		"?debug=1: as text"},
}
