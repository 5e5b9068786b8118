package simulator

import (
	"errors"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// The handlers turn a request into a call of the rack, and its result into status and body.

func ping(*engine.Simulation, *apiRequest) (int, any, error) {
	return http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"}, nil
}

func currentUser(rack *engine.Simulation, _ *apiRequest) (int, any, error) {
	user, err := rack.Silo.User()
	return http.StatusOK, user, err
}

func accessTokens(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	tokens, err := rack.Silo.AccessTokens()
	return http.StatusOK, slice(r.scan, tokens), err
}

func utilization(rack *engine.Simulation, _ *apiRequest) (int, any, error) {
	u, err := rack.Silo.Utilization()
	return http.StatusOK, u, err
}

func siloQuotas(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	q, err := rack.Silo.Quotas(r.ref("silo").Object)
	return http.StatusOK, q, err
}

func siloUtilization(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	u, err := rack.Silo.UtilizationOf(r.ref("silo").Object)
	return http.StatusOK, u, err
}

// fleetList is a list that an ordinary user of the silo may not see (A21).
func fleetList[T named](list func(engine.Silo) ([]T, error)) *operation {
	return &operation{list: true, serve: func(rack *engine.Simulation, r *apiRequest) (int, any,
		error) {
		items, err := list(rack.Silo)
		return http.StatusOK, slice(r.scan, items), err
	}}
}

func projectList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	items, err := rack.Silo.Projects(r.scan.window())
	return http.StatusOK, newPage(r.scan, items), err
}

func projectView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	p, err := rack.Silo.Project(&r.call, r.ref("project").Object)
	return http.StatusOK, p, err
}

func siloView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	silo, err := rack.Silo.View(&r.call, r.selector("silo"))
	return http.StatusOK, silo, err
}

func imageList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	items, err := rack.Images.List(&r.call, r.project(), r.scan.window())
	return http.StatusOK, newPage(r.scan, items), err
}

func imageView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	image, err := rack.Images.View(&r.call, r.ref("image"))
	return http.StatusOK, image, err
}

func imageCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	image, err := rack.Images.Create(&r.call, r.project(), r.body.(engine.ImageCreate))
	return http.StatusCreated, image, err
}

func imageDelete(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil, rack.Images.Delete(&r.call, r.ref("image"))
}

func imagePromote(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	image, err := rack.Images.Promote(&r.call, r.ref("image"))
	return http.StatusAccepted, image, err
}

// imageDemote has the new project in the query, so the image is the silo's or found by its ID.
func imageDemote(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	image, err := rack.Images.Demote(&r.call, r.ref("image").Object, r.project())
	return http.StatusAccepted, image, err
}

func diskList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	items, err := rack.Disks.List(&r.call, r.project(), r.scan.window())
	return http.StatusOK, newPage(r.scan, items), err
}

func diskView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	d, err := rack.Disks.View(&r.call, r.ref("disk"))
	return http.StatusOK, d, err
}

func diskCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	d, err := rack.Disks.Create(&r.call, r.project(), r.body.(engine.DiskCreate))
	return http.StatusCreated, d, err
}

// onDisk serves a call about the disk that the path names, which answers nothing.
func onDisk(do func(engine.Disks, *engine.Call, engine.Ref) error) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil, do(rack.Disks, &r.call, r.ref("disk"))
	}
}

func importWrite(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil, rack.Disks.Import(&r.call, r.ref("disk"),
		r.body.(engine.BulkWrite))
}

func importFinalize(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil, rack.Disks.Finalize(&r.call, r.ref("disk"), r.body.(string))
}

func snapshotList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	items, err := rack.Snapshots.List(&r.call, r.project(), r.scan.window())
	return http.StatusOK, newPage(r.scan, items), err
}

func snapshotView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	s, err := rack.Snapshots.View(&r.call, r.ref("snapshot"))
	return http.StatusOK, s, err
}

func snapshotCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	s, err := rack.Snapshots.Create(&r.call, r.project(), r.body.(engine.SnapshotCreate))
	return http.StatusCreated, s, err
}

func snapshotDelete(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil, rack.Snapshots.Delete(&r.call, r.ref("snapshot"))
}

func instanceList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	items, err := rack.Instances.List(&r.call, r.project(), r.scan.window())
	return http.StatusOK, newPage(r.scan, items), err
}

func instanceCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	i, err := rack.Instances.Create(&r.call, r.project(), r.body.(engine.InstanceCreate))
	return http.StatusCreated, i, err
}

// onInstance serves a call about the instance that the path names.
func onInstance(status int, do func(engine.Instances, *engine.Call, engine.Ref) (store.Instance,
	error)) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		i, err := do(rack.Instances, &r.call, r.instance())
		return status, i, err
	}
}

func instanceDelete(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil, rack.Instances.Delete(&r.call, r.instance())
}

func instanceUpdate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	i, err := rack.Instances.Update(&r.call, r.instance(), r.body.(engine.InstanceUpdate))
	return http.StatusOK, i, err
}

func instanceDiskList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	attached, err := rack.Attachments.List(&r.call, r.instance())
	return http.StatusOK, slice(r.scan, attached), err
}

func instanceDiskAttach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	d, err := rack.Attachments.Attach(&r.call, r.instance(), r.body.(store.Selector))
	return http.StatusAccepted, d, err
}

func instanceDiskDetach(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	d, err := rack.Attachments.Detach(&r.call, r.instance(), r.body.(store.Selector))
	return http.StatusAccepted, d, err
}

func interfaceList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	nics, err := rack.Instances.Interfaces(&r.call, r.instance())
	return http.StatusOK, slice(r.scan, nics), err
}

// serialConsole reads from one of two offsets, one of which must be given.
func serialConsole(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	const most = 1 << 20 // more than the rack keeps (16 KiB at each end), and than its clients ask for
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
	text, end, err := rack.Instances.Console(&r.call, r.instance(), from,
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

// interfaceOwner returns the instance that the query names.
func (r *apiRequest) interfaceOwner() engine.Ref {
	return engine.Ref{Project: r.project(), Object: r.selector("instance")}
}

func interfaceView(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	nic, err := rack.Instances.Interface(&r.call, r.interfaceOwner(), r.selector("interface"))
	return http.StatusOK, nic, err
}

func interfaceCreate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	nic, err := rack.Instances.CreateInterface(&r.call, r.interfaceOwner(),
		r.body.(engine.InterfaceCreate))
	return http.StatusCreated, nic, err
}

func interfaceUpdate(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	nic, err := rack.Instances.UpdateInterface(&r.call, r.interfaceOwner(), r.selector("interface"),
		r.body.(engine.InterfaceUpdate))
	return http.StatusOK, nic, err
}

func interfaceDelete(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	return http.StatusNoContent, nil,
		rack.Instances.DeleteInterface(&r.call, r.interfaceOwner(), r.selector("interface"))
}

func externalIPList(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	ips, err := rack.Instances.ExternalIPs(&r.call, r.instance())
	return http.StatusOK, page[any]{Items: ips}, err
}

// instanceNothing returns a list that is empty for every instance of this rack.
func instanceNothing(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	_, err := rack.Instances.View(&r.call, r.instance())
	return http.StatusOK, emptyPage(), err
}
