package simulator

import (
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// served are the operations that this simulator supports.
var served = withResources(withPools(map[string]*operation{
	"ping":                           {noAuth: true, serve: ping},
	"current_user_view":              inSilo(engine.Silo.User),
	"utilization_view":               inSilo(engine.Silo.Utilization),
	"current_user_access_token_list": whole(engine.Silo.AccessTokens),
	"rack_list":                      whole(engine.Silo.Racks),
	"silo_view":                      {serve: viewOf("silo", engine.Silo.View)},
	"silo_quotas_view":               ofSilo(engine.Silo.Quotas),
	"system_quotas_list":             whole(engine.Silo.AllQuotas),
	"silo_utilization_view":          ofSilo(engine.Silo.UtilizationOf),
	"silo_utilization_list":          whole(engine.Silo.AllUtilization),
	"project_list":                   {list: true, serve: answer(http.StatusOK, projectList)},
	"project_view":                   {serve: viewOf("project", engine.Silo.Project)},

	"disk_list":   {list: true, required: inProject, serve: listIn(engine.Disks.List)},
	"disk_create": {required: inProject, body: parseDiskCreate, serve: createIn(engine.Disks.Create)},
	"disk_view":   {serve: on(http.StatusOK, "disk", engine.Disks.View)},
	"disk_delete": {serve: end("disk", engine.Disks.Delete)},

	"disk_bulk_write_import_start": {serve: end("disk", engine.Disks.StartImport)},
	"disk_bulk_write_import": {body: parseBulkWrite, maxBody: maxBulkWrite,
		serve: nothing(importWrite)},
	"disk_bulk_write_import_stop": {serve: end("disk", engine.Disks.StopImport)},
	"disk_finalize_import":        {body: parseFinalize, serve: nothing(importFinalize)},

	"snapshot_list": {list: true, required: inProject, serve: listIn(engine.Snapshots.List)},
	"snapshot_create": {required: inProject, body: parseSnapshotCreate,
		serve: createIn(engine.Snapshots.Create)},
	"snapshot_view":   {serve: on(http.StatusOK, "snapshot", engine.Snapshots.View)},
	"snapshot_delete": {serve: end("snapshot", engine.Snapshots.Delete)},

	"image_list":    {list: true, serve: listIn(engine.Images.List)},
	"image_create":  {body: parseImageCreate, serve: createIn(engine.Images.Create)},
	"image_view":    {serve: on(http.StatusOK, "image", engine.Images.View)},
	"image_delete":  {serve: end("image", engine.Images.Delete)},
	"image_promote": {serve: on(http.StatusAccepted, "image", engine.Images.Promote)},
	"image_demote":  {required: inProject, serve: answer(http.StatusAccepted, imageDemote)},

	"instance_list": {list: true, required: inProject, serve: listIn(engine.Instances.List)},
	"instance_create": {required: inProject, body: parseInstanceCreate,
		serve: createIn(engine.Instances.Create)},
	"instance_view": {serve: on(http.StatusOK, "instance", engine.Instances.View)},
	"instance_update": {body: parseInstanceUpdate,
		serve: onWith(http.StatusOK, "instance", engine.Instances.Update)},
	"instance_delete": {serve: end("instance", engine.Instances.Delete)},
	"instance_start":  {serve: on(http.StatusAccepted, "instance", engine.Instances.Start)},
	"instance_stop":   {serve: on(http.StatusAccepted, "instance", engine.Instances.Stop)},
	"instance_reboot": {serve: on(http.StatusAccepted, "instance", engine.Instances.Reboot)},

	"instance_serial_console": {serve: serialConsole},

	"instance_disk_list": {list: true, serve: listOf(engine.Attachments.List)},
	"instance_disk_attach": {body: parseDiskPath,
		serve: onWith(http.StatusAccepted, "instance", engine.Attachments.Attach)},
	"instance_disk_detach": {body: parseDiskPath,
		serve: onWith(http.StatusAccepted, "instance", engine.Attachments.Detach)},

	"instance_network_interface_list": {list: true, required: []string{"instance"},
		serve: listOf(engine.Instances.Interfaces)},
	"instance_network_interface_create": {required: []string{"instance"},
		body:  func(f *fields) any { return readInterface(f) },
		serve: onWith(http.StatusCreated, "instance", engine.Instances.CreateInterface)},
	"instance_network_interface_view": {serve: answer(http.StatusOK, interfaceView)},
	"instance_network_interface_update": {body: parseInterfaceUpdate,
		serve: answer(http.StatusOK, interfaceUpdate)},
	"instance_network_interface_delete": {serve: nothing(interfaceDelete)},
	"instance_external_ip_list":         {serve: answer(http.StatusOK, externalIPList)},
	"instance_external_subnet_list":     {serve: answer(http.StatusOK, externalSubnets)},
	"instance_multicast_group_list":     {list: true, serve: answer(http.StatusOK, instanceNothing)},
	"instance_ephemeral_ip_attach": {body: parseEphemeral,
		serve: onWith(http.StatusAccepted, "instance", engine.Instances.AttachEphemeralIP)},
	"instance_ephemeral_ip_detach": {serve: ephemeralIPDetach},

	"instance_ssh_public_key_list":      {list: true, serve: ofInstance(engine.SSHKey)},
	"instance_affinity_group_list":      {list: true, serve: ofInstance(engine.AffinityGroup)},
	"instance_anti_affinity_group_list": {list: true, serve: ofInstance(engine.AntiAffinityGroup)},

	"floating_ip_attach": {selectors: inProject, body: parseFloatingIPAttach,
		serve: join("floating_ip", engine.Resources.AttachFloatingIP)},
	"floating_ip_detach": {selectors: inProject,
		serve: leave("floating_ip", engine.Resources.DetachFloatingIP)},
	"external_subnet_attach": {selectors: inProject, body: parseSubnetAttach,
		serve: join("external_subnet", engine.Resources.AttachExternalSubnet)},
	"external_subnet_detach": {selectors: inProject,
		serve: leave("external_subnet", engine.Resources.DetachExternalSubnet)},

	"vpc_firewall_rules_view": {required: inVPC[:1], selectors: inVPC,
		serve: answer(http.StatusOK, rulesView)},
	"vpc_firewall_rules_update": {required: inVPC[:1], selectors: inVPC, body: parseRules,
		serve: answer(http.StatusOK, rulesUpdate)},
	"networking_address_lot_list": {list: true, serve: resourceList(engine.AddressLot)},
	"networking_address_lot_create": {body: createBody(engine.AddressLot),
		serve: answer(http.StatusCreated, lotCreate)},
	"networking_address_lot_view":       {serve: viewOf("address_lot", engine.Resources.Lot)},
	"networking_address_lot_delete":     {serve: resourceDelete(engine.AddressLot)},
	"networking_address_lot_block_list": {list: true, serve: listed(lotBlocks)},
	"networking_switch_port_settings_list": {list: true, selectors: inPort,
		serve: resourceList(engine.PortSettings)},
	"networking_switch_port_settings_create": {body: createBody(engine.PortSettings),
		serve: answer(http.StatusCreated, portCreate)},
	"networking_switch_port_settings_view":   {serve: viewOf("port", engine.Resources.PortSettings)},
	"networking_switch_port_settings_delete": {selectors: inPort, serve: nothing(portDelete)},
	"vpc_subnet_list_network_interfaces": {list: true, selectors: inVPC,
		serve: listed(subnetInterfaces)},
}))

var (
	inProject = []string{"project"}
	inVPC     = []string{"vpc", "project"}
	inPort    = []string{"port_settings"}
)

// operation is an operation of the rack: its route, its parameters and its handler.
type operation struct {
	name, method string
	path         []string
	// noAuth means that no token is needed (A11).
	noAuth bool
	// list means that the operation accepts limit, page_token and sort_by. required are the other
	// parameters that the first page must have.
	list     bool
	required []string
	// selectors are the parameters of the query that name objects; nil means project and instance.
	selectors []string
	// body parses the request's body; nil means that there is no body.
	body func(*fields) any
	// maxBody is the limit for the body; 0 means the rack's default (A12).
	maxBody int
	// serve carries out the operation. It is nil if the rack has the operation and this simulator
	// lacks it.
	serve func(*engine.Simulation, *apiRequest) (status int, body any, err error)
}

//go:embed operations.txt
var operationsText string

// routes are all operations of the rack, by method and path.
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

// route finds a request's operation and the parameters in its path. If the path exists only for
// other methods, it returns 405 with Allow, and for an unknown path the rack's 404 (A01).
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

// unimplemented returns the error for an operation that a rack has and the simulator lacks.
func unimplemented(op *operation) error {
	return &engine.Error{Status: http.StatusNotImplemented,
		Message: fmt.Sprintf("the simulator does not have %s (%s /%s), which the rack has",
			op.name, op.method, strings.Join(op.path, "/"))}
}

// A handler turns a request into a call of the rack, and its result into status and body.
type handler = func(*engine.Simulation, *apiRequest) (int, any, error)

type group interface{ ~struct{ *engine.Simulation } }

// answer returns a handler that responds with a status and the result of do.
func answer[G group, T any](status int, do func(G, *apiRequest) (T, error)) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		body, err := do(G{rack}, r)
		return status, body, err
	}
}

// nothing returns a handler that responds without a body.
func nothing[G group](do func(G, *apiRequest) error) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil, do(G{rack}, r)
	}
}

// listed returns a handler that responds with a page of the list that do returns.
func listed[G group, T named](do func(G, *apiRequest) ([]T, error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (page[T], error) {
		items, err := do(rack, r)
		return slice(r.scan, items), err
	})
}

// whole lists objects of the silo. list returns all of them.
func whole[T named](list func(engine.Silo) ([]T, error)) *operation {
	return &operation{list: true,
		serve: listed(func(s engine.Silo, _ *apiRequest) ([]T, error) { return list(s) })}
}

func inSilo[T any](read func(engine.Silo) (T, error)) *operation {
	return &operation{serve: answer(http.StatusOK,
		func(s engine.Silo, _ *apiRequest) (T, error) { return read(s) })}
}

// ofSilo reads something of the silo that the path names.
func ofSilo[T any](read func(engine.Silo, store.Selector) (T, error)) *operation {
	return &operation{serve: answer(http.StatusOK,
		func(s engine.Silo, r *apiRequest) (T, error) { return read(s, r.selector("silo")) })}
}

func listIn[G group, T named](list func(G, *engine.Call, store.Selector, engine.Window) ([]T,
	error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (page[T], error) {
		items, err := list(rack, &r.call, r.project(), r.scan.window())
		return newPage(r.scan, items), err
	})
}

// createIn creates an object of the body in a project.
func createIn[G group, B, T any](create func(G, *engine.Call, store.Selector, B) (T,
	error)) handler {
	return answer(http.StatusCreated, func(rack G, r *apiRequest) (T, error) {
		return create(rack, &r.call, r.project(), r.body.(B))
	})
}

// on reads or changes the object that a parameter names.
func on[G group, T any](status int, param string,
	do func(G, *engine.Call, engine.Ref) (T, error)) handler {
	return answer(status, func(rack G, r *apiRequest) (T, error) {
		return do(rack, &r.call, r.ref(param))
	})
}

// viewOf reads an object whose parameter alone names it.
func viewOf[G group, T any](param string,
	view func(G, *engine.Call, store.Selector) (T, error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (T, error) {
		return view(rack, &r.call, r.selector(param))
	})
}

// onWith changes the object that a parameter names according to the body.
func onWith[G group, B, T any](status int, param string,
	do func(G, *engine.Call, engine.Ref, B) (T, error)) handler {
	return answer(status, func(rack G, r *apiRequest) (T, error) {
		return do(rack, &r.call, r.ref(param), r.body.(B))
	})
}

// end changes or deletes the object that a parameter names, and responds without a body.
func end[G group](param string, do func(G, *engine.Call, engine.Ref) error) handler {
	return nothing(func(rack G, r *apiRequest) error { return do(rack, &r.call, r.ref(param)) })
}

func listOf[G group, T named](list func(G, *engine.Call, engine.Ref) ([]T, error)) handler {
	return listed(func(rack G, r *apiRequest) ([]T, error) {
		return list(rack, &r.call, r.ref("instance"))
	})
}

func ping(*engine.Simulation, *apiRequest) (int, any, error) {
	return http.StatusOK, map[string]string{"status": "ok"}, nil
}

func projectList(s engine.Silo, r *apiRequest) (page[store.Project], error) {
	items, err := s.Projects(r.scan.window())
	return newPage(r.scan, items), err
}

// imageDemote moves an image to the project in the query. So a name in the path means an image of
// the silo.
func imageDemote(s engine.Images, r *apiRequest) (store.Image, error) {
	return s.Demote(&r.call, r.selector("image"), r.project())
}

func importWrite(s engine.Disks, r *apiRequest) error {
	return s.Import(&r.call, r.ref("disk"), r.body.(engine.BulkWrite))
}

func importFinalize(s engine.Disks, r *apiRequest) error {
	return s.Finalize(&r.call, r.ref("disk"), r.body.(string))
}

// serialConsole reads the bytes after an offset from the start, or the most recent ones.
func serialConsole(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	const most = 1 << 20 // more than a rack keeps (16 KiB at each end) or its clients request
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
	text, end, err := engine.Instances{Simulation: rack}.Console(&r.call, r.ref("instance"), from,
		min(given["max_bytes"], most))
	if errors.Is(err, engine.ErrNoConsole) {
		return 0, nil, unimplemented(r.op)
	}
	numbers := make([]int, len(text)) // a []byte would be a string in JSON
	for i, b := range text {
		numbers[i] = int(b)
	}
	return http.StatusOK, struct {
		Data []int `json:"data"`
		End  int64 `json:"last_byte_offset"`
	}{numbers, end}, err
}

func interfaceView(s engine.Instances, r *apiRequest) (store.NetworkInterface, error) {
	return s.Interface(&r.call, r.ref("instance"), r.selector("interface"))
}

func interfaceUpdate(s engine.Instances, r *apiRequest) (store.NetworkInterface, error) {
	return s.UpdateInterface(&r.call, r.ref("instance"), r.selector("interface"),
		r.body.(engine.InterfaceUpdate))
}

func interfaceDelete(s engine.Instances, r *apiRequest) error {
	return s.DeleteInterface(&r.call, r.ref("instance"), r.selector("interface"))
}

func externalIPList(s engine.Instances, r *apiRequest) (page[any], error) {
	ips, err := s.ExternalIPs(&r.call, r.ref("instance"))
	return page[any]{Items: ips}, err
}

// instanceNothing responds with a list that is empty for every instance of this rack.
func instanceNothing(s engine.Instances, r *apiRequest) (page[struct{}], error) {
	_, err := s.View(&r.call, r.ref("instance"))
	return page[struct{}]{Items: []struct{}{}}, err
}
