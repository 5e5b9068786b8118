package simulator

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var served = withResources(withPools(map[string]*operation{
	"ping":                           {noAuth: true, serve: ping},
	"current_user_view":              {serve: read(engine.Silo.User)},
	"utilization_view":               {serve: read(engine.Silo.Utilization)},
	"current_user_access_token_list": {list: true, serve: listed(engine.Silo.AccessTokens)},
	"rack_list":                      {list: true, serve: listed(engine.Silo.Racks)},
	"silo_view":                      {serve: read(engine.Silo.View)},
	"silo_quotas_view":               {serve: read(engine.Silo.Quotas)},
	"system_quotas_list":             {list: true, serve: listed(engine.Silo.AllQuotas)},
	"silo_utilization_view":          {serve: read(engine.Silo.UtilizationOf)},
	"silo_utilization_list":          {list: true, serve: listed(engine.Silo.AllUtilization)},
	"project_list":                   {list: true, serve: paged(engine.Silo.Projects)},
	"project_view":                   {serve: read(engine.Silo.Project)},

	"disk_list": {list: true, required: inProject, serve: paged(engine.List(store.Disks))},
	"disk_create": {required: inProject, body: parseDiskCreate,
		serve: answer(http.StatusCreated, engine.Disks.Create)},
	"disk_view":   {serve: read(engine.View(store.Disks))},
	"disk_delete": {serve: nothing(engine.Disks.Delete)},

	"disk_bulk_write_import_start": {serve: nothing(engine.Disks.StartImport)},
	"disk_bulk_write_import": {body: parseBulkWrite, maxBody: maxBulkWrite,
		serve: nothing(engine.Disks.Import)},
	"disk_bulk_write_import_stop": {serve: nothing(engine.Disks.StopImport)},
	"disk_finalize_import":        {body: parseFinalize, serve: nothing(engine.Disks.Finalize)},

	"snapshot_list": {list: true, required: inProject, serve: paged(engine.Snapshots.List)},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: answer(http.StatusCreated, engine.Snapshots.Create)},
	"snapshot_view":   {serve: read(engine.Snapshots.View)},
	"snapshot_delete": {serve: nothing(engine.Snapshots.Delete)},

	"image_list":    {list: true, serve: paged(engine.Images.List)},
	"image_create":  {body: parseImageCreate, serve: answer(http.StatusCreated, engine.Images.Create)},
	"image_view":    {serve: read(engine.View(store.Images))},
	"image_delete":  {serve: nothing(engine.Images.Delete)},
	"image_promote": {serve: answer(http.StatusAccepted, engine.Images.Promote)},
	"image_demote":  {required: inProject, serve: answer(http.StatusAccepted, engine.Images.Demote)},

	"instance_list": {list: true, required: inProject, serve: paged(engine.List(store.Instances))},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: answer(http.StatusCreated, engine.Instances.Create)},
	"instance_view": {serve: read(engine.View(store.Instances))},
	"instance_update": {body: parseInstanceUpdate,
		serve: answer(http.StatusOK, engine.Instances.Update)},
	"instance_delete": {serve: nothing(engine.Instances.Delete)},
	"instance_start":  {serve: answer(http.StatusAccepted, engine.Instances.Start)},
	"instance_stop":   {serve: answer(http.StatusAccepted, engine.Instances.Stop)},
	"instance_reboot": {serve: answer(http.StatusAccepted, engine.Instances.Reboot)},

	"instance_serial_console": {serve: serialConsole},

	"instance_disk_list": {list: true, serve: listed(engine.Attachments.List)},
	"instance_disk_attach": {body: parseDiskPath,
		serve: answer(http.StatusAccepted, engine.Attachments.Attach)},
	"instance_disk_detach": {body: parseDiskPath,
		serve: answer(http.StatusAccepted, engine.Attachments.Detach)},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: listed(engine.Instances.Interfaces)},
	"instance_network_interface_create": {required: []string{"instance"},
		body:  func(f *fields) any { return readInterface(f) },
		serve: change(http.StatusCreated, engine.Instances.CreateInterface)},
	"instance_network_interface_view": {serve: read(engine.Instances.Interface)},
	"instance_network_interface_update": {body: parseInterfaceUpdate,
		serve: change(http.StatusOK, engine.Instances.UpdateInterface)},
	"instance_network_interface_delete": {serve: end(engine.Instances.DeleteInterface)},
	"instance_external_ip_list":         {serve: whole(engine.Instances.ExternalIPs)},
	"instance_external_subnet_list":     {serve: whole(engine.Resources.ExternalSubnets)},
	"instance_multicast_group_list":     {list: true, serve: whole(noGroups)},
	"instance_ephemeral_ip_attach": {body: parseEphemeral,
		serve: change(http.StatusAccepted, engine.Instances.AttachEphemeralIP)},
	"instance_ephemeral_ip_detach": {serve: ephemeralIPDetach},

	"instance_ssh_public_key_list": {kind: engine.SSHKey, list: true,
		serve: listed(engine.Resources.OfInstance)},

	"floating_ip_attach": {selectors: inProject, body: parseFloatingIPAttach,
		serve: change(http.StatusAccepted, engine.Resources.AttachFloatingIP)},
	"floating_ip_detach": {selectors: inProject,
		serve: change(http.StatusAccepted, engine.Resources.DetachFloatingIP)},
	"external_subnet_attach": {selectors: inProject, body: parseSubnetAttach,
		serve: change(http.StatusAccepted, engine.Resources.AttachExternalSubnet)},
	"external_subnet_detach": {selectors: inProject,
		serve: change(http.StatusAccepted, engine.Resources.DetachExternalSubnet)},

	"vpc_firewall_rules_view": {required: inVPC[:1], selectors: inVPC,
		serve: read(engine.Resources.FirewallRules)},
	"vpc_firewall_rules_update": {required: inVPC[:1], selectors: inVPC, body: parseRules,
		serve: change(http.StatusOK, engine.Resources.ReplaceFirewallRules)},
	"networking_address_lot_list": {kind: engine.AddressLot, list: true,
		serve: paged(engine.Resources.List)},
	"networking_address_lot_create": {kind: engine.AddressLot, body: createBody(engine.AddressLot),
		serve: change(http.StatusCreated, engine.Resources.CreateLot)},
	"networking_address_lot_view":   {kind: engine.AddressLot, serve: read(engine.Resources.Lot)},
	"networking_address_lot_delete": {kind: engine.AddressLot, serve: end(engine.Resources.Delete)},
	"networking_address_lot_block_list": {kind: engine.AddressLot, list: true,
		serve: listed(engine.Resources.Blocks)},
	"networking_switch_port_settings_list": {kind: engine.PortSettings, list: true,
		selectors: inPort, serve: paged(engine.Resources.List)},
	"networking_switch_port_settings_create": {kind: engine.PortSettings,
		body:  createBody(engine.PortSettings),
		serve: change(http.StatusCreated, engine.Resources.Replace)},
	"networking_switch_port_settings_view": {kind: engine.PortSettings,
		serve: read(engine.Resources.PortSettings)},
	"networking_switch_port_settings_delete": {kind: engine.PortSettings, selectors: inPort,
		serve: end(engine.Resources.DeletePortSettings)},
	"vpc_subnet_list_network_interfaces": {list: true, selectors: inVPC,
		serve: listed(engine.Resources.Interfaces)},
}))

var (
	inProject = []string{"project"}
	inVPC     = []string{"vpc", "project"}
	inPort    = []string{"port_settings"}
)

type operation struct {
	name, method string
	path         []string
	// kind is the kind of resource that the operation handles, or nil.
	kind *engine.Kind
	// noAuth means that the operation needs no token (A11).
	noAuth bool
	// list means that the operation accepts limit, page_token and sort_by. required lists the query
	// parameters that a request without a page token must have.
	list     bool
	required []string
	// selectors are the query parameters that name objects; nil means project and instance.
	selectors []string
	// body parses the request's body. It is nil if the operation has no body.
	body func(*fields) any
	// maxBody limits the size of the body; 0 means the rack's default (A12).
	maxBody int
	// serve carries out the operation. It is nil if a rack has the operation, but not this simulator.
	serve func(*engine.Simulation, *apiRequest) (status int, body any, err error)
}

//go:embed operations.txt
var operationsText string

var routes = parseOperations(operationsText)

func parseOperations(text string) []*operation {
	var all []*operation
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) != 3 || words[0] == "#" {
			continue
		}
		op := &operation{}
		if known, ok := served[words[0]]; ok {
			op = known
		}
		if op.selectors == nil {
			op.selectors = []string{"project", "instance"}
		}
		op.name, op.method = words[0], words[1]
		op.path = strings.Split(words[2], "/")[1:]
		all = append(all, op)
	}
	return all
}

// route returns the operation for a method and a path, and the parameters in the path. The error is
// 404 if the path is unknown, and 405 if the path is known but not with this method (A01).
func route(method, escapedPath string) (*operation, url.Values, error) {
	segments, err := parsePath(escapedPath)
	if err != nil {
		return nil, nil, err
	}
	var allowed []string
	for _, op := range routes {
		params, ok := match(op.path, segments)
		switch {
		case !ok:
		case op.method == method:
			return op, params, nil
		default:
			allowed = append(allowed, op.method)
		}
	}
	if len(allowed) == 0 {
		return nil, nil, errNoRoute
	}
	slices.Sort(allowed)
	return nil, nil, &engine.Error{Status: http.StatusMethodNotAllowed, Message: "Method Not Allowed",
		Header: http.Header{"Allow": {strings.Join(slices.Compact(allowed), ", ")}}}
}

// parsePath splits a path into segments and ignores empty ones (A61).
func parsePath(escaped string) ([]string, error) {
	var segments []string
	for segment := range strings.SplitSeq(escaped, "/") {
		text, err := url.PathUnescape(segment)
		switch {
		case segment == "":
			continue
		case segment == ".", segment == "..", err != nil, !utf8.ValidString(text):
			return nil, badRequest("invalid path encoding")
		}
		segments = append(segments, text)
	}
	return segments, nil
}

func match(path, segments []string) (url.Values, bool) {
	if len(path) != len(segments) {
		return nil, false
	}
	params := url.Values{}
	for i, want := range path {
		switch {
		case strings.HasPrefix(want, "{"):
			params.Set(strings.Trim(want, "{}"), segments[i])
		case want != segments[i]:
			return nil, false
		}
	}
	return params, true
}

func unimplemented(op *operation) error {
	return &engine.Error{Status: http.StatusNotImplemented,
		Message: fmt.Sprintf("the simulator does not have %s (%s /%s), which the rack has",
			op.name, op.method, strings.Join(op.path, "/"))}
}

type handler = func(*engine.Simulation, *apiRequest) (int, any, error)

type group interface{ ~struct{ *engine.Simulation } }

func answer[G group, T any](status int, do func(G, *engine.Call) (T, error)) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		body, err := do(G{rack}, &r.call)
		return status, body, err
	}
}

func nothing[G group](do func(G, *engine.Call) error) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil, do(G{rack}, &r.call)
	}
}

func read[G group, T any](do func(G, *engine.Call, *store.Tx) T) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		body, err := engine.Reading(rack, func(tx *store.Tx) T { return do(G{rack}, &r.call, tx) })
		return http.StatusOK, body, err
	}
}

func change[G group, T any](status int, do func(G, *engine.Call, *store.Tx) T) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		body, err := engine.Changing(rack, &r.call,
			func(tx *store.Tx) T { return do(G{rack}, &r.call, tx) })
		return status, body, err
	}
}

func end[G group](do func(G, *engine.Call, *store.Tx)) handler {
	return change(http.StatusNoContent, func(rack G, call *engine.Call, tx *store.Tx) any {
		do(rack, call, tx)
		return nil
	})
}

func rows[G group, T, P any](read func(G, *engine.Call, *store.Tx) []T,
	shown func(scan, []T) P) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		items, err := engine.Reading(rack,
			func(tx *store.Tx) []T { return read(G{rack}, &r.call, tx) })
		return http.StatusOK, shown(r.scan, items), err
	}
}

// paged() takes a function that returns one page. listed() and whole() take a function that returns
// all objects: listed() sends one page of them, and whole() sends all.
func paged[G group, T named](read func(G, *engine.Call, *store.Tx) []T) handler {
	return rows(read, newPage[T])
}

func listed[G group, T named](read func(G, *engine.Call, *store.Tx) []T) handler {
	return rows(read, slice[T])
}

func whole[G group, T any](read func(G, *engine.Call, *store.Tx) []T) handler {
	return rows(read, func(_ scan, items []T) page[T] {
		return page[T]{Items: append([]T{}, items...)}
	})
}

func ping(*engine.Simulation, *apiRequest) (int, any, error) {
	return http.StatusOK, map[string]string{"status": "ok"}, nil
}

func serialConsole(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	const most = 1 << 20 // a rack keeps less (16 KiB at each end), and its clients request less
	given := map[string]int64{"max_bytes": most}
	for _, name := range []string{"from_start", "most_recent", "max_bytes"} {
		if r.query.Has(name) {
			n, err := parseNumber(r.query.Get(name), 63)
			if err != nil {
				return 0, nil, err
			}
			given[name] = int64(n)
		}
	}
	from, start := given["from_start"]
	back, recent := given["most_recent"]
	switch {
	case start == recent:
		return 0, nil, badRequest("Exactly one of 'from_start' or 'most_recent' must be specified.")
	case recent:
		from = -1 - back
	}
	text, end, err := engine.Instances{Simulation: rack}.Console(&r.call, from,
		min(given["max_bytes"], most))
	if errors.Is(err, engine.ErrNoConsole) {
		return 0, nil, unimplemented(r.op)
	}
	numbers := make([]int, len(text)) // JSON encodes a []byte as a string
	for i, b := range text {
		numbers[i] = int(b)
	}
	return http.StatusOK, struct {
		Data []int `json:"data"`
		End  int64 `json:"last_byte_offset"`
	}{numbers, end}, err
}

// noGroups returns an empty list if the instance exists: this rack has no multicast groups.
func noGroups(s engine.Silo, call *engine.Call, tx *store.Tx) []struct{} {
	engine.View(store.Instances)(s, call, tx)
	return nil
}

// withResources adds the operations on members of affinity groups and on each kind of resource,
// such as vpc_create for the kind "vpc" and the verb "create".
func withResources(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for _, k := range []*engine.Kind{engine.AffinityGroup, engine.AntiAffinityGroup} {
		name := k.Operation + "_member_"
		maps.Copy(all, map[string]*operation{
			"instance_" + k.Operation + "_list": {kind: k, list: true,
				serve: listed(engine.Resources.OfInstance)},
			name + "list": {kind: k, list: true, selectors: k.Ancestors(),
				serve: listed(engine.Resources.Members)},
			name + "instance_view": {kind: k, selectors: k.Ancestors(),
				serve: read(engine.Resources.Member)},
			name + "instance_add": {kind: k, selectors: k.Ancestors(),
				serve: change(http.StatusCreated, engine.Resources.AddMember)},
			name + "instance_delete": {kind: k, selectors: k.Ancestors(),
				serve: end(engine.Resources.RemoveMember)},
		})
	}
	for line := range strings.Lines(operationsText) {
		name, _, _ := strings.Cut(line, " ")
		for _, k := range engine.Kinds {
			verb, ok := strings.CutPrefix(name, k.Operation+"_")
			op := resourceOperation(k, verb)
			if k.Operation != "" && ok && op != nil && all[name] == nil {
				all[name] = op
			}
		}
	}
	return all
}

func resourceOperation(k *engine.Kind, verb string) *operation {
	above := k.Ancestors()
	op := &operation{kind: k, selectors: above}
	switch verb {
	case "list":
		op.list, op.required = true, above[:min(len(above), 1)]
		op.serve = paged(engine.Resources.List)
	case "create":
		op.required, op.body = above[:min(len(above), 1)], createBody(k)
		op.serve = change(http.StatusCreated, engine.Resources.Create)
	case "view":
		op.serve = read(engine.Resources.View)
	case "update":
		op.body, op.serve = updateBody(k), change(http.StatusOK, engine.Resources.Update)
	case "delete":
		op.serve = end(engine.Resources.Delete)
	default:
		return nil
	}
	return op
}

func ephemeralIPDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	version := r.query.Get("ip_version")
	if r.query.Has("ip_version") && !slices.Contains(ipVersions, version) {
		return 0, nil, badQuery("%s", unknownVariant(version, ipVersions))
	}
	return end(func(s engine.Instances, call *engine.Call, tx *store.Tx) {
		s.DetachEphemeralIP(call, version, tx)
	})(rack, r)
}

func withPools(operations map[string]*operation) map[string]*operation {
	all := maps.Clone(operations)
	for parts, k := range map[string]*engine.Kind{"range": engine.IPPool,
		"member": engine.SubnetPool} {
		system, silo := k.Operation, strings.TrimPrefix(k.Operation, "system_")
		add, remove := parseExtent, parseExtent
		if k == engine.SubnetPool {
			add, remove = parseMember, parseSubnet
		}
		maps.Copy(all, map[string]*operation{
			silo + "_list":           {kind: k, list: true, serve: listed(engine.Pools.Linked)},
			silo + "_view":           {kind: k, serve: read(engine.Pools.View)},
			"silo_" + silo + "_list": {kind: k, list: true, serve: listed(engine.Pools.LinkedTo)},
			system + "_silo_list":    {kind: k, list: true, serve: listed(engine.Pools.Links)},
			system + "_silo_link": {kind: k, body: parseLink,
				serve: change(http.StatusCreated, engine.Pools.Link)},
			system + "_silo_update": {kind: k, body: parseDefault,
				serve: change(http.StatusOK, engine.Pools.UpdateLink)},
			system + "_silo_unlink":        {kind: k, serve: end(engine.Pools.Unlink)},
			system + "_" + parts + "_list": {kind: k, list: true, serve: listed(engine.Pools.Extents)},
			system + "_" + parts + "_add": {kind: k, body: add,
				serve: change(http.StatusCreated, engine.Pools.AddExtent)},
			system + "_" + parts + "_remove": {kind: k, body: remove,
				serve: end(engine.Pools.RemoveExtent)},
			system + "_utilization_view": {kind: k, serve: read(engine.Pools.Utilization)},
		})
	}
	return all
}
